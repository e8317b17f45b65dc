"""DLRM, a recommender: who clicks on what? Bags of embeddings, numbers, and their dot products.

ravnest train examples/dlrm/model.py:job --nodes 3
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ravnest as rv

NUM_USERS, NUM_ITEMS, NUM_TAGS, TAGS_PER_ITEM, NUM_NUMBERS = 400, 200, 50, 3, 4


def make_clicks(count: int, seed: int) -> dict[str, Tensor]:
    """Return who saw what, and whether they clicked: tastes are hidden vectors that nobody is told."""
    hidden = torch.Generator().manual_seed(1234)
    tastes, kinds = (torch.randn(size, 4, generator=hidden) for size in (NUM_USERS, NUM_TAGS))
    tags_of_items = torch.randint(NUM_TAGS, (NUM_ITEMS, TAGS_PER_ITEM), generator=hidden)
    generator = torch.Generator().manual_seed(seed)
    users, items = (torch.randint(size, (count,), generator=generator) for size in (NUM_USERS, NUM_ITEMS))
    numbers = torch.randn(count, NUM_NUMBERS, generator=generator)
    tags = tags_of_items[items]
    likes = (tastes[users] * kinds[tags].mean(1)).sum(1) + numbers[:, 0] - 0.5 * numbers[:, 1]
    clicked = torch.rand(count, generator=generator) < torch.sigmoid(2 * likes)
    return {"users": users, "items": items, "tags": tags, "numbers": numbers, "clicked": clicked.float()}


class Dlrm(nn.Module):
    """Every feature becomes a vector; the top layers see the numbers and how each two vectors agree."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(NUM_USERS, width), nn.Embedding(NUM_ITEMS, width)
        self.tags = nn.EmbeddingBag(NUM_TAGS, width, mode="mean")
        self.bottom = nn.Sequential(
            *(nn.Linear(NUM_NUMBERS, 4 * width), nn.ReLU()), nn.Linear(4 * width, width)
        )
        self.register_buffer("pairs", torch.tril_indices(4, 4, offset=-1))
        self.top = nn.Sequential(*(nn.Linear(width + 6, 4 * width), nn.ReLU()), nn.Linear(4 * width, 1))
        for table in (self.users, self.items, self.tags):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, users: Tensor, items: Tensor, tags: Tensor, numbers: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        vectors = torch.stack([dense, self.users(users), self.items(items), self.tags(tags)], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        agreement = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, agreement], dim=1)).squeeze(1)


def job(tiny: bool = False) -> rv.Job:
    """Return the job."""
    torch.manual_seed(0)
    return rv.Job(
        Dlrm(4 if tiny else 16),
        make_clicks(512 if tiny else 65536, seed=0),
        val_data=make_clicks(128 if tiny else 8192, seed=1),
        batch_size=128,
        epochs=1 if tiny else 2,
        loss=lambda out, batch: F.binary_cross_entropy_with_logits(out, batch["clicked"]),
        metrics={"accuracy": lambda out, batch: ((out > 0) == (batch["clicked"] > 0.5)).float().mean()},
        name="dlrm",
    )
