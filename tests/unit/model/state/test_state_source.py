"""State sources read one tensor, or a part of it, whatever they are made of."""

import pytest
import torch
from safetensors.torch import save

from ravnest.model.state.safetensors_header import read_tensors
from ravnest.model.state.state_source import (
    FileSource,
    LayeredSource,
    MemorySource,
    SourceTensors,
    StateSource,
    read_tensor,
    write_pieces,
)

STATE = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.arange(6).to(torch.bfloat16),
    "c": torch.tensor([True, False]),
    "d": torch.empty(0, 2),
    "turned": torch.arange(6.0).view(2, 3).t(),
}


def sources() -> list[StateSource]:
    plain = {name: tensor.contiguous() for name, tensor in STATE.items()}
    return [MemorySource(STATE), FileSource(read_tensors(save(plain)))]


@pytest.mark.parametrize("source", sources(), ids=["memory", "files"])
def test_all_of_a_tensor_and_any_part_of_it_are_read(source: StateSource) -> None:
    assert source.types.keys() == STATE.keys()
    for name, tensor in STATE.items():
        whole = bytes(source.read(name))
        assert whole == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for start in range(0, len(whole), 3):
            for stop in (start, start + 1, start + 5, len(whole), len(whole) + 9, None):
                assert bytes(source.read(name, start, stop)) == whole[start:stop], (name, start, stop)
        assert torch.equal(read_tensor(source, name), tensor)
    written = {
        tensor.name: bytes(tensor.buffer) for tensor in read_tensors(b"".join(write_pieces(source, "ba")))
    }
    assert written == {"b": bytes(source.read("b")), "a": bytes(source.read("a"))}


def test_layers_are_read_from_the_first_that_has_a_name() -> None:
    above = MemorySource({"a": torch.zeros(2), "optimizer/step/a": torch.ones(())})
    below = MemorySource(STATE | {"empty": torch.empty(3, device="meta")})
    both = LayeredSource(above, below)
    assert both.is_of("a", above)
    assert both.is_of("b", below)
    assert "empty" not in both.types
    found = SourceTensors(both)
    assert [*found] == ["a", "b", "c", "d", "turned"]
    assert len(found) == 5
    assert torch.equal(found["a"], torch.zeros(2))
    with pytest.raises(KeyError):
        found["empty"]
    found["b"].zero_()  # a copy
    assert torch.equal(found["b"], STATE["b"])
