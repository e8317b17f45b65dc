"""Two towers as in CLIP: images of three digits meet their names, like "four two nine".

ravnest train examples/clip/model.py:job --nodes 3
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import ravnest as rv

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LENGTH = 3 * 6  # characters of three names


def make_pairs(images: Tensor, labels: Tensor, count: int) -> dict[str, Tensor]:
    """Return images of 8 x 24 pixels and what they show, character by character."""
    chosen = torch.randint(len(images), (count, 3), generator=torch.Generator().manual_seed(0))
    texts = ["".join(NAMES[labels[digit]].ljust(6) for digit in three) for three in chosen.tolist()]
    return {
        "image": images[chosen].permute(0, 2, 1, 3).flatten(2)[:, None],
        "text": torch.tensor([list(text.encode()) for text in texts]),
    }


class TwoTowers(nn.Module):
    """A tower for images and one for texts; both end in a vector of the same width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.image = nn.Sequential(
            *(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(2 * width * 2 * 6, width)),
        )
        self.letters, self.places = nn.Embedding(128, width), nn.Parameter(0.02 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.text = nn.TransformerEncoder(layer, num_layers=2)
        self.out = nn.Linear(LENGTH * width, width)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        seen = F.normalize(self.image(image), dim=-1)
        read = self.out(self.text(self.letters(text) + self.places).flatten(1))
        return self.scale.exp() * seen @ F.normalize(read, dim=-1).T


def find_partners(scores: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of a whole batch: each image should find its text among all, and each text its image.

    The loss of half a batch is another one. Ravnest notices, and no batch is cut into microbatches.
    """
    pairs = torch.arange(scores.shape[0], device=scores.device)
    return (F.cross_entropy(scores, pairs) + F.cross_entropy(scores.T, pairs)) / 2


def is_found(scores: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the share of images whose text has the highest score."""
    return (scores.argmax(1) == torch.arange(scores.shape[0], device=scores.device)).float().mean()


def job(tiny: bool = False) -> rv.Job:
    """Return the job; the digits of the validation data were never seen."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, digits.target
    torch.manual_seed(0)
    return rv.Job(
        TwoTowers(8 if tiny else 32),
        make_pairs(images[:1400], labels[:1400], 128 if tiny else 16384),
        val_data=make_pairs(images[1400:], labels[1400:], 64 if tiny else 512),
        batch_size=64,
        epochs=1 if tiny else 3,
        loss=find_partners,
        metrics={"found": is_found},
        name="clip",
    )
