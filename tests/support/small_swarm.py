"""A small job and peers as real programs, for tests that care how they reach each other."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import ravnest as rv
from ravnest.config import Averaging
from ravnest.hub.coordinator.notices import EpochDone, Notice
from ravnest.net.identity import Token, write_token
from ravnest.requester.session import LOCAL_PLAN
from tests.support.forked import Forked

# Memory is what the model needs, and no more; and there are as many clusters as there can be.
PLAN = replace(LOCAL_PLAN, overhead_bytes=0.0, clusters=99, averaging=Averaging.OVERLAPPED)
NUM_SAMPLES = 256
ENDLESS = 10_000  # epochs: the run ends when its test has seen enough
MEMORY_BYTES = 1_500_000  # the model needs two peers that lend so little
END_SECONDS = 120  # for a program to end: only one that hangs needs so long
PROGRAM = (sys.executable, "-m", "ravnest")
# A hub answers once it has captured the model, which takes a busy PC minutes.
BARE_JOIN = (*PROGRAM, "join", "--on-battery", "go", "--patience", "600 s")
JOIN = (*BARE_JOIN, "--flops", "1 GFLOP/s", "--bandwidth", "1 GB/s", "--latency", "10 ms")
ROOT = Path(__file__).resolve().parents[2]


def stop_run() -> None:
    """End the job that is trained here, as Ctrl-C and `ravnest stop` do: what was trained is kept."""
    os.kill(os.getpid(), signal.SIGINT)


def make_job(epochs: int = 2, num_samples: int = NUM_SAMPLES, average_every: int | str = "auto") -> rv.Job:
    torch.manual_seed(0)
    inner = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.ReLU())]
    model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), *inner, nn.Linear(128, 4))
    inputs = torch.randn(num_samples, 16, generator=torch.Generator().manual_seed(1))
    return rv.Job(
        model,
        {"x": inputs, "y": inputs[:, :4].argmax(-1)},
        batch_size=16,
        epochs=epochs,
        average_every=average_every,
        optimizer="adamw",
        learning_rate=1e-3,
        loss=lambda out, batch: F.cross_entropy(out, batch["y"]),
    )


def check_books(told: Sequence[Notice], epochs: int | None = 2, num_samples: int = NUM_SAMPLES) -> None:
    """Every sample of every epoch was trained once.

    Without a number of epochs it is so of those that were done when the run was stopped. The last lease of
    one may then lie with a slow cluster although a later one is done.
    """
    done = [news for news in told if isinstance(news, EpochDone)]
    assert {(news.num_samples, news.num_dropped) for news in done} == {(num_samples, 0)}
    counted = [news.epoch for news in done]
    assert counted == sorted(set(counted)), "in order, and each once"
    assert epochs is None or counted == [epoch + 1 for epoch in range(epochs)]


@contextmanager
def joining(
    token: Token,
    *options: Sequence[str],
    prefix: Sequence[Sequence[str]] = (),
    join: Sequence[str] = JOIN,
) -> Iterator[list[Forked | subprocess.Popen[str]]]:
    """Start one peer per tuple of options, forked if it needs no prefix; they must end well."""
    environment = {**os.environ, "RAVNEST_TOKEN": write_token(token), "OMP_NUM_THREADS": "1"}
    running: list[Forked | subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number, each in enumerate(options):
                words = [*join, "--name", f"node{number}", "--memory", f"{MEMORY_BYTES} B", *each]
                if prefix:
                    command = [*prefix[number], *words]
                    pipes = {"stderr": subprocess.PIPE, "text": True}
                    running.append(subprocess.Popen(command, env=environment, cwd=ROOT, **pipes))
                else:
                    said = Path(folder, f"node{number}.txt")
                    running.append(Forked(words[len(PROGRAM) :], environment, said))
            yield running
            for process in running:
                said = process.communicate(timeout=END_SECONDS)[1]
                assert process.returncode == 0, said
        finally:
            for process in running:
                process.kill()
                process.communicate()
