"""gloo's all_reduce over clusters that are cut differently: one group per segment, all at once."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.shapes import Floats, Shape
from ravnest.ids import NodeId


@dataclass(frozen=True, slots=True)
class Gloo:
    """A node's groups, by the interval of its vector they average."""

    groups: list[tuple[slice, Any]]
    weight: float
    total_weight: float

    @classmethod
    def join(cls, node: NodeId, shape: Shape, path: str, interface: str) -> "Gloo":
        """Meet the other nodes over a file; everyone makes every group, in the same order."""
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        names = list(shape.stages)
        dist.init_process_group(
            "gloo", init_method=f"file://{path}", rank=names.index(node), world_size=len(names)
        )
        first = shape.stages[node][1].start * shape.items_per_position
        groups = []
        for start, stop, owners in shape.owned_within(0, shape.num_items):
            group = dist.new_group([names.index(owner) for owner in owners], backend="gloo")
            if node in owners:
                groups.append((slice(start - first, stop - first), group))
        total = sum(range(1, len(shape.clusters) + 1))
        return cls(groups, shape.weights[node], float(total))

    def average(self, vector: Floats) -> Floats:
        """Return the weighted mean; every segment is under way at once."""
        import torch
        import torch.distributed as dist

        total = torch.from_numpy(vector * np.float32(self.weight))
        work = [dist.all_reduce(total[where], group=group, async_op=True) for where, group in self.groups]
        for each in work:
            each.wait()
        mean: Floats = total.div_(self.total_weight).numpy()
        return mean

    def leave(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()
