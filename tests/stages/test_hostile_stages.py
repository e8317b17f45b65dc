"""Blueprints that pass for valid but are hostile: whatever they do, the process that watches survives.

Allowed kernels may crash on hostile sizes, so a stage runs in a process of its own. Here that process is
real: it reads, checks, rebuilds and trains hundreds of altered blueprints under a memory limit.
"""

import contextlib
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stage_runner import subject

from ravnest.model.blueprint.blueprint_json import write_blueprint

ROOT = Path(__file__).parents[2]
NUM_PER_FAMILY = 60
NUMBERS = [-1, 0, 1, 2, 3, 7, 64, 255, -2, 2**20, -(2**20), 2**31 - 1, 2**31, 2**40, -(2**40), 2**63 - 1]
FLOATS = [0.0, -1.0, 1e30, "nan", "inf", 1.0]


class StageProcess:
    """A stage process that is started again when a blueprint has killed it."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.support.hostile_worker"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def try_blueprint(self, text: str) -> str:
        answer = self._ask(json.dumps(text) + "\n")
        if not answer:
            self.stop()
            self._start()
        return answer or "died"

    def _ask(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line)
            self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture(scope="module")
def stage_process() -> Iterator[StageProcess]:
    process = StageProcess()
    yield process
    process.stop()


def alter(document: dict, source: random.Random) -> None:
    """Change one or two arguments of the training program to something a reader may well accept."""
    slots = []

    def walk(holder: object) -> None:
        items = list(holder.items()) if isinstance(holder, dict) else list(enumerate(holder))
        for key, value in items:
            if isinstance(value, dict | list):
                walk(value)
            elif value is not None and not isinstance(value, str):
                slots.append((holder, key))

    ops = document["train"]["ops"]
    for op in ops:
        walk(op[1])
    ids = [out for op in ops for out in op[2] if out is not None]
    for _ in range(source.randint(1, 2)):
        holder, key = source.choice(slots)
        value = holder[key]
        if isinstance(value, bool):
            holder[key] = not value
        elif isinstance(value, float):
            holder[key] = source.choice(FLOATS)
        else:
            holder[key] = source.choice([*NUMBERS, *source.sample(ids, 3)])


@pytest.mark.parametrize("family", ["own_gpt", "resnet", "unet", "lstm"])
def test_altered_blueprints_never_take_the_peer_with_them(family: str, stage_process: StageProcess) -> None:
    good = write_blueprint(subject(family).captured.blueprint).decode()
    assert stage_process.try_blueprint(good) == "ran"
    source = random.Random(7)
    outcomes: Counter[str] = Counter()
    for _ in range(NUM_PER_FAMILY):
        document = json.loads(good)
        alter(document, source)
        outcomes[stage_process.try_blueprint(json.dumps(document))] += 1
    assert sum(outcomes.values()) == NUM_PER_FAMILY
    assert outcomes["died"] == 0, "a kernel that crashes on shapes preflight could have checked"
    assert stage_process.try_blueprint(good) == "ran"


def test_a_stage_that_dies_is_noticed_and_started_again(stage_process: StageProcess) -> None:
    stage_process.process.kill()
    stage_process.process.wait()
    assert stage_process.try_blueprint("{}") == "died"
    assert stage_process.try_blueprint("{}") == "refused-by-reading"
