"""What no program has is captured in other words: operators, complex numbers, a bare loss."""

import linecache
import re

import pytest
import torch
from torch import Tensor, nn

from ravnest.errors import CaptureError
from ravnest.model.blueprint.operators import operators
from ravnest.model.blueprint.slicing import slice_blueprint
from ravnest.model.capture.capture import Captured, capture
from ravnest.model.stage.dry_run import dry_run
from ravnest.model.stage.stage_program import build_stage_program

pytestmark = pytest.mark.usefixtures("one_thread")


class Subject(nn.Module):
    """Returns nothing but its loss, which subclasses make of six features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return self.last(self.mix(self.first(x), places)).square().mean()

    def mix(self, x: Tensor, places: Tensor) -> Tensor:
        return x


class Composed(Subject):
    def mix(self, x: Tensor, places: Tensor) -> Tensor:
        twice = torch.hstack([torch.concatenate([x, x], 1)[:, :6], x])
        return twice[:, 3:9] / torch.linalg.norm(twice, dim=-1, keepdim=True)


class WrittenInPlace(Subject):
    def mix(self, x: Tensor, places: Tensor) -> Tensor:
        added = torch.zeros_like(x).index_add_(1, places[0], x[:, :3])
        return added + torch.ones_like(x).scatter_(1, places, 2.0).mul_(x)


class Triangle(Subject):
    def mix(self, x: Tensor, places: Tensor) -> Tensor:
        rows, columns = torch.tril_indices(3, 3)
        square = x.new_zeros(x.shape[0], 3, 3)
        square[:, rows, columns] = x
        return torch.cat([square.sum(1), square.sum(2)], dim=1)


class Turned(Subject):
    def mix(self, x: Tensor, places: Tensor) -> Tensor:
        angles = torch.polar(torch.ones(1, 3), torch.arange(3.0)[None] * 0.3)
        turned = torch.view_as_complex(x.reshape(-1, 3, 2)) * angles[:, None, :].view(1, 3)
        return torch.view_as_real(turned * 2.0).flatten(1)


class Noisy(Subject):
    def mix(self, x: Tensor, places: Tensor) -> Tensor:
        return x + torch.randn(x.shape[0], 1) * torch.rand(x.shape[0], 6)


class NoiseFirst(Subject):
    """Begins with noise; what it reads of the batch comes last."""

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return (self.first(torch.randn(x.shape[0], 6)) * self.last(x)).square().mean()


class NoiseAndMask(Subject):
    """Begins with noise, beside a mask that the last stage makes again."""

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        is_kept = places[:, :1] < 7
        made = self.last(self.first(torch.randn(x.shape[0], 6)).relu())
        return torch.where(is_kept, made, 0.0).square().mean() + x.mean()


class MaskFirst(Subject):
    """Makes a mask by batch size; its first stage has no part of the batch and needs none."""

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        mask = torch.ones(x.shape[0], 1)
        start = self.first(torch.ones(1, 6))
        return (self.last(x + start) * mask).square().mean()


class NoiseAlone(Subject):
    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return self.last(self.first(torch.randn(x.shape[0], 6))).square().mean()  # refused


class NoiseBehindAMean(Subject):
    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        mean = self.first(x).mean(0).tanh()
        return (self.last(torch.randn(x.shape[0], 6)) * mean).square().mean()  # refused


class AlwaysEnough(Subject):
    def mix(self, x: Tensor, places: Tensor) -> Tensor:
        return x * 2 if x.shape[0] // 2 * 2 + x.shape[0] % 2 == x.shape[0] else x


class ByTwos(Subject):
    def mix(self, x: Tensor, places: Tensor) -> Tensor:
        return x * 2 if torch.sym_min(x.shape[0] % 2, 1) == 0 else x


class Masked(Subject):
    def mix(self, x: Tensor, places: Tensor) -> Tensor:
        x = x * 2
        x[x > 0.5] = 0.25
        x[places[:, 0] > 7] = self.last.bias
        return x


class MaskedRows(Subject):
    def mix(self, x: Tensor, places: Tensor) -> Tensor:
        x = x * 2
        x[places[:, 0] == 0] = x + 1
        return x


class Bags(Subject):
    """Numbers of embeddings in rows, one of them padding, and with weights of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.EmbeddingBag(6, 6)
        self.sum = nn.EmbeddingBag(6, 6, mode="sum", padding_idx=5)
        self.padded_mean, self.max = nn.EmbeddingBag(6, 6, padding_idx=-1), nn.EmbeddingBag(6, 6, mode="max")

    def mix(self, x: Tensor, places: Tensor) -> Tensor:
        weighted = self.sum(places, per_sample_weights=x[:, :3].sigmoid())
        return x + self.mean(places) + weighted + self.padded_mean(places) + self.max(places)


class BagsByOffsets(Subject):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(6, 6)

    def mix(self, x: Tensor, places: Tensor) -> Tensor:
        return x + self.bags(places.flatten(), 3 * torch.arange(places.shape[0]))


class Inverted(Subject):
    def mix(self, x: Tensor, places: Tensor) -> Tensor:
        return x @ torch.linalg.pinv(self.last.weight)


def captured(model: nn.Module) -> Captured:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 6), "places": torch.tensor([[0, 2, 5]] * 4)}
    return capture(model, batch)  # which compares three stages with the module


@pytest.mark.parametrize(
    "kind",
    [
        Subject,
        Composed,
        WrittenInPlace,
        Triangle,
        Turned,
        Noisy,
        NoiseFirst,
        NoiseAndMask,
        MaskFirst,
        AlwaysEnough,
        Masked,
        Bags,
    ],
)
def test_the_stages_compute_what_the_module_does(kind: type[Subject]) -> None:
    found = captured(kind()).blueprint
    dry_run(found, 4, max_bytes=1e8, max_flops=1e9)
    for place in range(found.num_positions):
        build_stage_program(slice_blueprint(found, place, place + 1), recompute=True)
    assert {op.name for program in (found.train, found.evaluate) for op in program.ops} <= set(operators())


def test_a_write_of_rows_to_masked_places_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"test_plain_operators\.py.*reads a number out of a tensor"):
        captured(MaskedRows())


def test_what_each_stage_makes_again_moves_no_cut() -> None:
    assert captured(MaskFirst()).blueprint.num_positions == 2


@pytest.mark.parametrize("kind", [NoiseAlone, NoiseBehindAMean])
def test_a_size_of_the_batch_where_nothing_of_it_arrives_is_refused(kind: type[Subject]) -> None:
    with pytest.raises(CaptureError, match="it needs the batch size") as refused:
        captured(kind())
    place = re.match(r"(.*):(\d+) ", str(refused.value))
    assert place is not None, refused.value
    assert "# refused" in linecache.getline(place.group(1), int(place.group(2)))


def test_a_condition_that_fails_for_some_batch_sizes_is_refused() -> None:
    with pytest.raises(CaptureError, match="behaves differently by batch size"):
        captured(ByTwos())


def test_a_rule_that_ends_in_an_operator_that_is_not_allowed_names_the_one_in_the_code() -> None:
    with pytest.raises(CaptureError, match=r"test_plain_operators\.py.*linalg_pinv.*not on the list"):
        captured(Inverted())


def test_bags_of_different_lengths_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"embedding_bag.*not on the list"):
        captured(BagsByOffsets())
