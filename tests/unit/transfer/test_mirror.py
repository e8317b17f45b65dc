"""Weights behind URLs: fetched by ranges, gone on with after a cut, and believed by their hash alone."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ravnest.errors import RavnestError, WeightsError
from ravnest.model.state.state_source import read_tensor
from ravnest.transfer.mirror import MirrorSource, read_mirror, write_mirror
from tests.support.mirror_server import Server, serving

TENSORS = {
    "weight": torch.arange(1_000_000, dtype=torch.float32),
    "bias": torch.arange(10).to(torch.bfloat16),
    "none": torch.empty(0, 3),
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "served"
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors")
    with serving(folder) as found:
        (tmp_path / "mirror.json").write_bytes(write_mirror(folder, found.url))
        yield found


def source(tmp_path: Path) -> MirrorSource:
    return MirrorSource(read_mirror(tmp_path / "mirror.json"), tmp_path, timeout_seconds=60.0)


@pytest.mark.parametrize("fault", ["", "cut", "long"])
def test_tensors_come_by_range_and_as_they_were(server: Server, tmp_path: Path, fault: str) -> None:
    server.fault = fault
    found = source(tmp_path)
    assert found.types.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(read_tensor(found, name), tensor)
    assert found.read("weight", 4, 8) == torch.tensor(1.0).numpy().tobytes()
    ranges = [(start, stop) for start, stop in server.asked if stop - start > 100]
    assert len(ranges) == (1 if fault != "cut" else len(ranges))
    assert all(one[0] < two[0] and one[1] == two[1] for one, two in pairwise(ranges))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mirror.json", "served"]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            "lies",
            r"does not hold 'weight' as the mirror's list says: its hash is another; use another mirror",
        ),
        ("gone", r"does not give bytes from \d+ on: HTTP Error 404.*; try again later"),
        ("silent", r"does not give bytes from \d+ on: .*; try again later"),
        ("file", r"does not give bytes from \d+ on: .*file"),
        ("loop", r"does not give bytes from \d+ on: "),
        ("whole", r"gives no ranges of bytes \(it answers 200\)"),
        ("elsewhere", "gives no ranges of bytes"),
    ],
)
def test_what_is_not_right_is_refused_with_a_sentence(
    server: Server, tmp_path: Path, fault: str, says: str
) -> None:
    server.fault = fault
    with pytest.raises(WeightsError, match=says):
        source(tmp_path).read("weight")
    assert len(server.asked) < 40


def test_a_server_that_is_not_there_is_told(server: Server, tmp_path: Path) -> None:
    server.shutdown()
    server.server_close()
    with pytest.raises(WeightsError, match=r"does not give bytes from \d+ on: .*[Rr]efused"):
        source(tmp_path).read("weight")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"url": "file:///etc/passwd"}, "url"),
        ({"url": "http:///weights"}, "without a host"),
        ({"hash": "0"}, "hash"),
        ({"start": -1}, "start"),
        ({"dtype": "object"}, "which no tensor is"),
        ({"shape": [2**40, 2**40]}, "which no tensor is"),
        ({"more": 1}, "more"),
    ],
)
def test_a_list_that_cannot_be_is_refused(tmp_path: Path, change: dict[str, object], says: str) -> None:
    entry = {"url": "http://127.0.0.1:1/a", "start": 0, "dtype": "float32", "shape": [2], "hash": "0" * 64}
    (tmp_path / "mirror.json").write_text(json.dumps({"tensors": {"a": entry}}))
    assert read_mirror(tmp_path / "mirror.json")["a"].type.size_bytes == 8
    (tmp_path / "mirror.json").write_text(json.dumps({"tensors": {"a": entry | change}}))
    with pytest.raises(RavnestError, match=says):
        read_mirror(tmp_path / "mirror.json")
    for junk in ("", "{}", '{"tensors": {}}', "[" * 100):
        (tmp_path / "mirror.json").write_text(junk)
        with pytest.raises(RavnestError):
            read_mirror(tmp_path / "mirror.json")
