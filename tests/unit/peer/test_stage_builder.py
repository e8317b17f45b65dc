"""A stage is assembled from mapped content without keeping it in memory beside the copies."""

import os
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

from ravnest.disk import write_nameless
from ravnest.ids import HUB, NodeId
from ravnest.model.blueprint.program import PARAMETER, StateEntry
from ravnest.model.state.state_dict import snapshot_pieces
from ravnest.peer.stage_builder import assemble_stage
from ravnest.protocol.placement import BlobRef, Source, StageParts
from tests.support.sample_blueprints import perceptron

SHAPE = (5000, 5000)  # 100 MB


def mapped_bytes() -> int:
    """Return how much of the files that this process maps is in memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile"):
            return 1024 * int(line.split()[1])
    raise AssertionError("no RssFile")


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="only Linux tells")
def test_what_a_stage_was_made_of_takes_no_memory(tmp_path: Path) -> None:
    entry = StateEntry("large", PARAMETER, "float32", SHAPE, (0,), is_trainable=True)
    blueprint = replace(perceptron(), state=(entry,), aliases=())
    content = write_nameless(snapshot_pieces({"large": torch.ones(SHAPE)}, {}), tmp_path)
    ref = BlobRef("0" * 64, len(content))
    parts = StageParts(1, 0, ref, (Source(HUB, ref),))
    before = mapped_bytes()
    snapshot, _ = assemble_stage(blueprint, parts, [content], None, NodeId("a"), "cpu")
    assert snapshot.state["large"].sum() == prod(SHAPE)
    assert mapped_bytes() - before < 30e6
