"""What a stage of nothing but a head holds, microbatch after microbatch: `python -m benchmarks.head_memory`.

Without a GPU a tiny head runs, and no bytes are known.
"""

import gc
import json
from dataclasses import replace

import torch

from benchmarks.models import GPTS, Gpt, make_tokens, token_loss

_NUM_MICROBATCHES, _PER_UPDATE, _SIZE = 24, 4, 8


def watch_head(is_split: bool) -> list[int]:
    """Return the MB that are allocated after each microbatch, with Python's collector at rest."""
    import ravnest as rv
    from ravnest.engine.recipe import from_torch
    from ravnest.engine.stage import StageEngine
    from ravnest.engine.weight_versions import Snapshot
    from ravnest.model.blueprint.slicing import slice_blueprint
    from ravnest.model.stage.stage_program import build_stage_program
    from ravnest.peer.stage_builder import find_roles

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = replace(GPTS["small" if device == "cuda" else "tiny"], is_tied=False)
    data = make_tokens(shape, _SIZE)
    captured = rv.capture(
        Gpt(shape), data, lambda logits, batch: token_loss(logits, batch["labels"]), inputs=["ids"]
    )
    stop = captured.blueprint.stop
    part = slice_blueprint(captured.blueprint, stop - 1, stop)
    state = {entry.name: captured.state[entry.name].detach().to(device) for entry in part.state}
    trained = {entry.name: state[entry.name] for entry in part.state if entry.is_trainable}
    settings = from_torch(torch.optim.AdamW(trained.values(), lr=1e-4, fused=device == "cuda"), trained)
    program = build_stage_program(part, device, autocast=torch.bfloat16 if device == "cuda" else None)
    roles = find_roles(part, program.castable)
    engine = StageEngine(program, Snapshot(0, state, {}), roles, settings, is_split, True)
    fields = {name: data[name] for _, name in part.train.fields}
    inputs = {
        value: torch.randn(_SIZE, shape.length, shape.width, device=device) for value in part.train.inputs
    }
    found = []
    for number in range(_NUM_MICROBATCHES):
        engine.forward(number, inputs, fields, key=(0, number))
        engine.backward_inputs(number, {})
        engine.backward_weights(number, 1.0, _SIZE)
        if number % _PER_UPDATE == _PER_UPDATE - 1:
            engine.update(1e-4)
        found.append(torch.cuda.memory_allocated() // 1_000_000 if device == "cuda" else 0)
    return found


if __name__ == "__main__":
    gc.collect()
    gc.disable()
    for is_split in (True, False):
        print(json.dumps({"is_split": is_split, "allocated_megabytes": watch_head(is_split)}), flush=True)
