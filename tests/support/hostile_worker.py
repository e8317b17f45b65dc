"""A provider's stage process, as the peer will start it: reads blueprints, answers what became of each.

One JSON string per line in (a blueprint), one word per line out. The process may die; whoever started it sees
which blueprint it was.
"""

import json
import resource
import sys

import torch

from ravnest.errors import ProtocolError, UnsafeBlueprint
from ravnest.model.blueprint.blueprint_json import read_blueprint
from ravnest.model.blueprint.program import Blueprint
from ravnest.model.stage.dry_run import dry_run
from ravnest.model.stage.stage_program import build_stage_program

NUM_SAMPLES = 2
MAX_BYTES, MAX_FLOPS = 64e6, 1e9
MEMORY_BYTES = 6 << 30  # torch itself maps a few gigabytes


def try_blueprint(text: str) -> str:
    """Do with a blueprint what a peer does, and say how far it came."""
    try:
        blueprint = read_blueprint(text.encode("utf-8", "surrogatepass"))
    except UnsafeBlueprint:
        return "refused-by-reading"
    try:
        dry_run(blueprint, NUM_SAMPLES, max_bytes=MAX_BYTES, max_flops=MAX_FLOPS)
    except UnsafeBlueprint:
        return "refused-by-preflight"
    try:
        _train(blueprint)
    except (UnsafeBlueprint, ProtocolError):
        return "refused-by-rebuild"
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        return "stopped-by-torch"
    return "ran"


def _train(blueprint: Blueprint) -> None:
    program = blueprint.train
    state = {
        entry.name: torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype)).requires_grad_(
            entry.is_trainable
        )
        for entry in blueprint.state
    }
    given = {
        value: torch.ones(
            program.values[value].shape_at(NUM_SAMPLES), dtype=getattr(torch, program.values[value].dtype)
        )
        for value in (*program.inputs, *(value for value, _ in program.fields))
    }
    inputs = {value: given[value] for value in program.inputs}
    fields = {name: given[value] for value, name in program.fields}
    passed = build_stage_program(blueprint).forward(state, inputs, fields, key=(1, 1))
    ends = [*passed.outputs.values(), *passed.results.values()]
    for end in ends:
        if end.requires_grad:
            end.sum().backward(retain_graph=True)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    torch.set_num_threads(1)
    answer("ready")
    for line in sys.stdin:
        answer(try_blueprint(json.loads(line)))


def answer(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
