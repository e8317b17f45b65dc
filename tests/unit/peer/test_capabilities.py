"""The device and the memory that a PC lends."""

import pytest
import torch

from ravnest.errors import ConfigError
from ravnest.peer import capabilities


@pytest.mark.parametrize(
    ("num_cuda", "has_mps", "asked", "found"),
    [
        (0, False, "auto", "cpu"),
        (2, True, "auto", "cuda:0"),
        (0, True, "auto", "mps"),
        (2, False, "cpu", "cpu"),
        (2, False, "cuda", "cuda:0"),
        (2, False, "cuda:1", "cuda:1"),
        (2, False, "cuda:2", None),
        (0, False, "cuda", None),
        (0, False, "mps", None),
        (0, False, "tpu", None),
    ],
)
def test_the_device_is_the_one_asked_for_or_the_fastest(
    monkeypatch: pytest.MonkeyPatch, num_cuda: int, has_mps: bool, asked: str, found: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    if found is None:
        with pytest.raises(ConfigError, match=f"--device {asked} is not here: torch sees .*cpu"):
            capabilities.choose_device(asked)
    else:
        assert capabilities.choose_device(asked) == found


def test_of_a_gpu_most_of_what_is_free_there_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: {"cuda:1": (10e9, 16e9)}[device])
    assert capabilities.lent_memory_bytes("cuda:1") == 8e9
    assert capabilities.lent_memory_bytes("cpu") > 0
