"""Attention in an export: one operation of the query's size, whether its insides are run or not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._C import DispatchKey

from ravnest.model.capture.export_hazards import closed_attention

pytestmark = pytest.mark.timeout(60)


class Attend(nn.Module):
    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.values = nn.Linear(3, num_features)

    def forward(self, x):
        x = x.view(x.shape[0], 2, 4, 3)
        return F.scaled_dot_product_attention(x, x, self.values(x), is_causal=True).transpose(1, 2).flatten(2)


def export(num_features):
    shapes = ({0: torch.export.Dim("batch")},)
    found = torch.export.export(Attend(num_features), (torch.randn(3, 24),), dynamic_shapes=shapes)
    return [
        (str(node.target), str(node.meta["val"].shape), node.meta["val"].stride()[-1])
        for node in found.graph.nodes
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)
    ]


@pytest.mark.parametrize("num_features", [3, 5], ids=["of the query's size", "of another"])
def test_what_is_exported_is_the_same(num_features):
    attention = torch.ops.aten.scaled_dot_product_attention.default
    opened = export(num_features)
    with closed_attention(), closed_attention():
        assert DispatchKey.CompositeImplicitAutograd in attention.py_kernels
        closed = export(num_features)
    assert DispatchKey.CompositeImplicitAutograd not in attention.py_kernels
    assert closed == opened
    assert any("scaled_dot_product_attention" in name for name, *_ in closed)


def test_real_tensors_are_attended_to_meanwhile():
    x = torch.randn(2, 2, 4, 3)
    expected = F.scaled_dot_product_attention(x, x, x)
    with closed_attention():
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), expected)
