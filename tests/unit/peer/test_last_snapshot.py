"""What a peer gives away at the end: what was trained, and no frozen weights."""

from types import SimpleNamespace
from typing import Any

import torch

from ravnest.engine.weight_versions import Snapshot
from ravnest.peer.stage_host import StageHost
from ravnest.protocol.placement import SnapshotOrder


class OneStage:
    """Builds a stage with a frozen and a trained weight."""

    def build(self, item: Any, held: Any) -> tuple[Any, Any]:
        state = {"base": torch.zeros(3), "adapter": torch.ones(2)}
        worker = SimpleNamespace(
            frozen=frozenset({"base"}),
            is_exact=False,
            tied=SimpleNamespace(is_settled=True, is_ready=True),
            stage=SimpleNamespace(snapshot=lambda copies: Snapshot(1, state, {})),
            close_update=lambda: None,
        )
        return worker, SimpleNamespace()


def test_only_the_last_snapshot_is_without_frozen_weights() -> None:
    host = StageHost(OneStage(), lambda: 0.0)  # type: ignore[arg-type]
    host._build(SimpleNamespace(parts=SimpleNamespace(build_id=1)))  # type: ignore[arg-type]
    (on_the_way,) = host.handle(SnapshotOrder(1, 1, is_final=False))
    (last,) = host.handle(SnapshotOrder(1, 2, is_final=True))
    assert set(on_the_way.snapshot.state) == {"base", "adapter"}, "another peer may go on from it"
    assert set(last.snapshot.state) == {"adapter"}
