"""A diffusion model learns to draw digits: it is shown noisy ones and says which noise is in them.

ravnest train examples/diffusion/model.py:job --nodes 3
python examples/diffusion/model.py    # the same, and then it draws some
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import ravnest as rv


def add_noise(images: Tensor, num_copies: int, seed: int) -> dict[str, Tensor]:
    """Return copies of the images at random times: at 0 there is the image alone, at 1 noise alone."""
    generator = torch.Generator().manual_seed(seed)
    clean = images.repeat(num_copies, 1, 1, 1)
    time = torch.rand(len(clean), generator=generator)
    noise = torch.randn(clean.shape, generator=generator)
    angle = (time * torch.pi / 2)[:, None, None, None]
    return {"noisy": angle.cos() * clean + angle.sin() * noise, "time": time, "noise": noise}


class Block(nn.Module):
    """A residual block that is told the time."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(num_inputs, num_outputs, 3, padding=1)
        self.second = nn.Conv2d(num_outputs, num_outputs, 3, padding=1)
        self.skip, self.time = nn.Conv2d(num_inputs, num_outputs, 1), nn.Linear(16, num_outputs)
        self.norm = nn.GroupNorm(4, num_outputs)

    def forward(self, x: Tensor, waves: Tensor) -> Tensor:
        inner = F.silu(self.norm(self.first(x)) + self.time(waves)[:, :, None, None])
        return self.skip(x) + self.second(inner)


class UNet(nn.Module):
    """Down from 8 x 8 to 4 x 4 pixels and up again, with a skip between the two."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.middle = Block(1, width), Block(width, 2 * width)
        self.up, self.out = Block(3 * width, width), nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        angles = 3 * time[:, None] * torch.arange(1, 9, device=time.device)
        waves = torch.cat([angles.sin(), angles.cos()], dim=1)
        wide = self.down(noisy, waves)
        deep = self.middle(F.avg_pool2d(wide, 2), waves)
        joined = torch.cat([wide, F.interpolate(deep, scale_factor=2.0)], dim=1)
        return self.out(F.silu(self.up(joined, waves)))


def job(tiny: bool = False) -> rv.Job:
    """Return the job."""
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    train, val = (images[:64], images[64:96]) if tiny else (images[:1437], images[1437:])
    torch.manual_seed(0)
    return rv.Job(
        UNet(4 if tiny else 24),
        add_noise(train, 1 if tiny else 16, seed=0),
        val_data=add_noise(val, 1 if tiny else 4, seed=1),
        batch_size=32,
        loss=lambda out, batch: F.mse_loss(out, batch["noise"]),
        name="diffusion",
    )


@torch.no_grad()
def draw(model: nn.Module, count: int, num_steps: int = 50) -> Tensor:
    """Return digits: noise, from which the model takes away some at every step."""
    x = torch.randn(count, 1, 8, 8)
    for step in range(num_steps, 0, -1):
        now, then = (torch.tensor(each / num_steps * torch.pi / 2) for each in (step - 0.5, step - 1))
        noise = model(x, (now / torch.pi * 2).expand(count))
        clean = ((x - now.sin() * noise) / now.cos()).clamp(-1, 1)
        x = then.cos() * clean + then.sin() * noise
    return x


if __name__ == "__main__":
    diffusion = job()
    with rv.local(nodes=3) as hub:
        result = hub.fit(diffusion)
    result.load_into(diffusion.model)
    for row in draw(diffusion.model.eval(), 8)[:, 0].transpose(0, 1).flatten(1):
        print("".join(" .:*#"[min(4, int((value + 1) * 2.5))] for value in row.tolist()))  # noqa: T201
