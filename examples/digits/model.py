"""Handwritten digits, 8 x 8 pixels, that come with scikit-learn: nothing to download.

ravnest train examples/digits/model.py:job --nodes 3
"""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ravnest as rv

NUM_TRAIN = 1500


def load_digits() -> tuple[Tensor, Tensor]:
    """Return images and labels; without scikit-learn they are noise, and nothing can be learned from them."""
    try:
        from sklearn import datasets
    except ModuleNotFoundError:
        warnings.warn("scikit-learn is not installed: the digits are random noise", stacklevel=2)
        generator = torch.Generator().manual_seed(0)
        noise = torch.rand(1797, 1, 8, 8, generator=generator)
        return noise, torch.randint(10, (1797,), generator=generator)
    found = datasets.load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    return images, torch.tensor(found.target)


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(64, 64, 3, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(64 * 4 * 4, 128),
    nn.ReLU(),
    nn.Linear(128, 10),
)
images, labels = load_digits()
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
images, labels = images[order], labels[order]
job = rv.Job(
    model,
    {"x": images[:NUM_TRAIN], "y": labels[:NUM_TRAIN]},
    val_data={"x": images[NUM_TRAIN:], "y": labels[NUM_TRAIN:]},
    batch_size=32,
    epochs=8,
    loss=lambda out, batch: F.cross_entropy(out, batch["y"]),
    metrics={"acc": lambda out, batch: (out.argmax(-1) == batch["y"]).float().mean()},
)
