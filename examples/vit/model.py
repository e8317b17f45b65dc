"""A vision transformer (ViT) reads handwritten digits: images of 8 x 8 pixels in patches of 2 x 2.

ravnest train examples/vit/model.py:job --nodes 3
"""

import torch
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

import ravnest as rv


def job(tiny: bool = False) -> rv.Job:
    """Return the job; a ViT that gets labels returns its loss itself."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, val = (order[:64], order[64:96]) if tiny else (order[:1437], order[1437:])
    width, depth = (16, 2) if tiny else (48, 4)
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=4,
        intermediate_size=4 * width,
        num_labels=10,
    )
    torch.manual_seed(0)
    return rv.Job(
        ViTForImageClassification(config),
        {"pixel_values": images[train], "labels": labels[train]},
        val_data={"pixel_values": images[val], "labels": labels[val]},
        batch_size=32,
        epochs=1 if tiny else 12,
        metrics={"accuracy": lambda out, batch: (out.logits.argmax(-1) == batch["labels"]).float().mean()},
        name="vit",
    )
