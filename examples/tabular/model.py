"""A table with categories and numbers, and an optimizer and a scheduler of torch: how many bikes are rented?

ravnest train examples/tabular/model.py:job --nodes 3
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ravnest as rv

NUM_CATEGORIES = {"month": 12, "weekday": 7, "hour": 24, "weather": 4}


def make_table(count: int, seed: int) -> dict[str, Tensor]:
    """Return rentals by the hour: commuters, weekends, rain, warmth, and chance."""
    generator = torch.Generator().manual_seed(seed)
    month, weekday, hour, weather = (
        torch.randint(size, (count,), generator=generator) for size in NUM_CATEGORIES.values()
    )
    season = torch.cos((month - 6.5) * torch.pi / 6)
    warmth, wind = season + torch.randn(count, generator=generator), torch.rand(count, generator=generator)
    rush = torch.exp(-((hour - 8) ** 2) / 4) + torch.exp(-((hour - 17) ** 2) / 6)
    leisure = torch.exp(-((hour - 14) ** 2) / 18)
    rentals = torch.where(weekday < 5, 2 * rush + 0.5 * leisure, 1.5 * leisure)
    rentals = rentals * torch.sigmoid(1.5 * warmth) * (1 - 0.3 * weather) * (1 - 0.4 * wind)
    rentals = rentals + 0.1 * torch.randn(count, generator=generator)
    return {
        "categories": torch.stack([month, weekday, hour, weather], dim=1),
        "numbers": torch.stack([warmth, wind], dim=1),
        "rentals": rentals,
    }


class TableNet(nn.Module):
    """An embedding for each column of categories, beside the numbers; then some layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, 8) for size in NUM_CATEGORIES.values())
        self.numbers = nn.BatchNorm1d(2)
        self.layers = nn.Sequential(
            *(nn.Linear(8 * len(NUM_CATEGORIES) + 2, width), nn.ReLU()),
            *(nn.Linear(width, width), nn.ReLU()),
            nn.Linear(width, 1),
        )

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        known = [embed(categories[:, column]) for column, embed in enumerate(self.embeddings)]
        return self.layers(torch.cat([*known, self.numbers(numbers)], dim=1)).squeeze(1)


def job(tiny: bool = False) -> rv.Job:
    """Return the job; its scheduler runs on this PC, and only its numbers travel."""
    torch.manual_seed(0)
    model = TableNet(8 if tiny else 128)
    epochs, num_train = (1, 256) if tiny else (10, 8192)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    num_updates = epochs * num_train // 64
    return rv.Job(
        model,
        make_table(num_train, seed=0),
        val_data=make_table(64 if tiny else 2048, seed=1),
        batch_size=64,
        epochs=epochs,
        loss=lambda out, batch: F.mse_loss(out, batch["rentals"]),
        optimizer=optimizer,
        schedule=rv.per_update(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_updates)),
        name="tabular",
    )
