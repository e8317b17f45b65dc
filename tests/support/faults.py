"""Faults that real peers suffer while a hub here trains with them, each at a moment named by what happens.

A `Story` hears all news, events and orders of the hub; its steps wait for one of them, each in its turn. The
job has no end of its own: the story stops it when all steps are taken and training went on after them.
"""

import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ravnest as rv
from benchmarks.joining import Peers
from ravnest.config import TIMEOUTS, Timeouts
from ravnest.hub.coordinator.events import Action, Event, Notify
from ravnest.hub.coordinator.notice_texts import show_notice
from ravnest.hub.coordinator.notices import (
    ClusterDissolved,
    ClusterStarted,
    EpochDone,
    Evaluated,
    Notice,
    Trained,
    WorkLost,
)
from ravnest.hub.service.server import HubParts
from ravnest.hub.service.status import ClusterStatus, StatusTracker
from ravnest.net.identity import write_token
from ravnest.requester.result import Result
from tests.support.small_swarm import ENDLESS, check_books, stop_run
from tests.support.small_swarm import PLAN as SMALL_PLAN

PLAN = replace(SMALL_PLAN, max_stages=3, clusters=2)  # of seven nodes one is a spare
NUM_SAMPLES, NUM_VALIDATION = 1024, 256
EPOCHS = 4  # that are trained at least
FLOPS_PER_SECOND = 1.5e8  # of an emulated device: a microbatch takes a stage of three 20 ms
MEMORY_BYTES = 2.3e6  # a third of what the model needs


def make_job(**options: Any) -> rv.Job:
    """Return a job that three of these peers can do, and that goes on until it is stopped."""
    torch.manual_seed(0)
    inner = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.ReLU())]
    given = {"epochs": ENDLESS, "average_every": 8, "checkpoint_every": "1 s", **options}
    return rv.Job(
        nn.Sequential(nn.Linear(16, 128), nn.ReLU(), *inner, nn.Linear(128, 4)),
        _make_data(NUM_SAMPLES, 1),
        val_data=_make_data(NUM_VALIDATION, 2),
        batch_size=32,
        microbatches=2,
        loss=lambda out, batch: F.cross_entropy(out, batch["y"]),
        optimizer="adamw",
        learning_rate=1e-3,
        schedule=rv.constant(),  # any other would follow from the length
        inputs=["x"],
        **given,
    )


def _make_data(num_samples: int, seed: int) -> dict[str, Tensor]:
    """Return points around one centre per class, too near each other to be told apart always."""
    centres = torch.randn(4, 16, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (num_samples,), generator=generator)
    return {"x": centres[labels] + 1.5 * torch.randn(num_samples, 16, generator=generator), "y": labels}


@dataclass(frozen=True)
class Step:
    """What is done when something is heard."""

    when: Callable[[Any], bool]
    act: Callable[["Story"], object]


@dataclass
class Story:
    """Steps that wait for their turn, and everything that was told, with the time."""

    steps: list[Step]
    told: list[tuple[float, Notice]] = field(default_factory=list)
    began_at: float = field(default_factory=time.monotonic)
    faults: list[tuple[float, str]] = field(default_factory=list)
    watch: StatusTracker | None = None
    peers: Peers | None = None
    has_gone_on: bool = False  # an epoch was done after the last step
    is_stopped: bool = False

    def hear(self, thing: Any) -> None:
        """Take the next step if this is what it waits for."""
        if self.steps and self.steps[0].when(thing):
            self.steps.pop(0).act(self)

    def tell(self, news: Notice) -> None:
        """Hear news."""
        self.told.append((time.monotonic(), news))
        if not isinstance(news, Trained | Evaluated):
            self._say(show_notice(news))
        self.has_gone_on |= not self.steps and isinstance(news, EpochDone)
        self.hear(news)
        is_enough = self.has_gone_on and len(self.of(EpochDone)) >= EPOCHS
        if is_enough and isinstance(news, Trained) and not self.is_stopped:
            self.is_stopped = True
            stop_run()

    def look(self, tracker: StatusTracker) -> None:
        """Know where the run stands."""
        self.watch = tracker

    def see(self, event: Event, orders: tuple[Action, ...]) -> None:
        """Hear an event and what is ordered, but for news."""
        for thing in (event, *orders):
            if not isinstance(thing, Notify):
                self.hear(thing)

    @property
    def clusters(self) -> tuple[ClusterStatus, ...]:
        """The clusters, as they are now."""
        assert self.watch is not None
        return self.watch.status().clusters

    def node(self, role: int, cluster: int = 0) -> str:
        """Return who has a place in the line of a cluster, of one that trains if any does; -1 is the leaf."""
        running = [each for each in self.clusters if each.is_running]
        return (running or self.clusters)[cluster].nodes[role]

    def spare(self) -> str:
        """Return somebody who is here and in no cluster."""
        assert self.watch is not None
        return next(each.name for each in self.watch.status().members if each.cluster is None)

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a peer, and remember when."""
        assert self.peers is not None
        self.note(f"{number.name} to {name}")
        self.peers.send(name, number)

    def note(self, fault: str) -> None:
        """Remember when a fault happens."""
        self.faults.append((time.monotonic(), fault))
        self._say(fault)

    def _say(self, text: str) -> None:
        """Write what is seen with `-s`, and when a test fails."""
        sys.stderr.write(f"{time.monotonic() - self.began_at:6.2f} {text}\n")

    def of(self, *kinds: type) -> list[Any]:
        """Return the news of these kinds."""
        return [news for _, news in self.told if isinstance(news, kinds)]

    def recovery_seconds(self) -> list[tuple[str, float]]:
        """Return, for each fault, how long it took until a cluster was whole again or given up."""
        ends = [at for at, news in self.told if isinstance(news, ClusterStarted | ClusterDissolved)]
        pairs = [(what, at, next((end for end in ends if end > at), None)) for at, what in self.faults]
        return [(what, end - at) for what, at, end in pairs if end is not None]


@contextlib.contextmanager
def swarm(
    story: Story,
    folder: Path,
    num_peers: int,
    far: tuple[str, str] | None = None,
    memory_bytes: float = MEMORY_BYTES,
    timeouts: Timeouts = TIMEOUTS,
) -> Iterator[rv.Hub]:
    """Open a hub whose peers are started with it, one of them at the far end of a cable if there is one."""
    place = "0.0.0.0:0" if far else "127.0.0.1:0"
    parts = HubParts(timeouts=timeouts, watch=story.see)
    hub = rv.Hub(place, plan=PLAN, tell=story.tell, look=story.look, parts=parts)
    with hub:
        device = {"flops_per_second": FLOPS_PER_SECOND, "memory_bytes": memory_bytes}
        token, port = hub.token, hub.token.addresses[0].rpartition(":")[2]
        if far:
            ways = (f"tcp://127.0.0.1:{port}", f"tcp://{far[1]}:{port}")
            token = msgspec.structs.replace(token, addresses=ways)
        story.peers = Peers(write_token(token), folder, **device)
        try:
            for number in range(num_peers):
                story.peers.start(f"node{number}")
            if far:
                story.peers.start("far", space=f"/var/run/netns/{far[0]}", door="0.0.0.0:0")
            yield hub
            for name in story.peers.alive:
                story.peers.end(name)
        finally:
            story.peers.close()


def check(story: Story, result: Result) -> float:
    """Check that all steps were taken and every sample counted once in each epoch; return the last loss."""
    assert not story.steps, "the run ended before all faults had happened"
    assert story.is_stopped
    done = story.of(EpochDone)
    if story.of(WorkLost):  # what was done since the checkpoint is trained, and told, once more
        done = list({news.epoch: news for news in done}.values())
    check_books(done, None, NUM_SAMPLES)
    assert math.isfinite(result.metrics["val_loss"])
    return float(done[-1].loss)


def is_news(kind: type | tuple[type, ...], count: int = 1) -> Callable[[Any], bool]:
    """Return what waits for so many news (or events, or orders) of a kind."""
    seen = 0

    def is_it(thing: Any) -> bool:
        nonlocal seen
        seen += isinstance(thing, kind)
        return isinstance(thing, kind) and seen >= count

    return is_it
