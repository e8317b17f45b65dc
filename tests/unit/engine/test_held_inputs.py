"""Inputs that are freed between forward and backward come back with the same numbers."""

import torch

from ravnest.engine.weight_versions import HeldInputs


def test_what_can_be_made_again_takes_no_memory_meanwhile() -> None:
    values = torch.arange(12.0).reshape(3, 4)
    inputs = {1: values.clone().requires_grad_(), 2: torch.ones(3)}
    version = inputs[1]._version
    held = HeldInputs(inputs, {1: lambda: values}, ())
    assert inputs[1].untyped_storage().nbytes() == 0
    assert inputs[1].shape == values.shape
    assert inputs[2].untyped_storage().nbytes() == 12  # nobody can make it again
    held.restore()
    held.restore()  # once is enough
    assert torch.equal(inputs[1].detach(), values)
    assert inputs[1]._version == version  # autograd takes it for the same


def test_what_is_passed_on_or_lies_in_a_buffer_stays() -> None:
    passed, buffer = torch.ones(4), bytearray(16)
    inputs = {1: passed, 2: torch.frombuffer(buffer, dtype=torch.float32)}
    HeldInputs(inputs, {1: passed.clone, 2: passed.clone}, [passed.view(2, 2)])
    assert [tensor.untyped_storage().nbytes() for tensor in inputs.values()] == [16, 16]
