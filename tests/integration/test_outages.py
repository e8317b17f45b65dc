"""Cables are cut while real programs train: nobody is given up, and nothing is trained again."""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import ravnest as rv
from benchmarks.joining import Peers
from ravnest.hub.coordinator.events import Action, Event, SendFields
from ravnest.hub.coordinator.notices import (
    ClusterBroken,
    CutOff,
    EpochDone,
    Joined,
    Left,
    PlanFormed,
    Returned,
    Trained,
    WorkLost,
)
from ravnest.hub.service.server import HubParts
from ravnest.net.identity import write_token
from tests.support.as_root import call, networks
from tests.support.faults import (
    FLOPS_PER_SECOND,
    MEMORY_BYTES,
    PLAN,
    Step,
    Story,
    check,
    is_news,
    make_job,
)

pytestmark = pytest.mark.needs_root


class Granted:
    """Counts the samples that clusters are given to train."""

    def __init__(self, story: Story) -> None:
        self._story, self.num_samples = story, 0

    def see(self, event: Event, orders: tuple[Action, ...]) -> None:
        """Look at what is ordered."""
        leased = (each.samples for each in orders if isinstance(each, SendFields) and not each.is_evaluation)
        self.num_samples += sum(len(samples) for batches in leased for samples in batches)
        self._story.see(event, orders)


@contextmanager
def far_swarm(
    story: Story, folder: Path, watch: Callable[..., None], peers: dict[str, tuple[str, str]], *, here: str
) -> Iterator[rv.Hub]:
    """Open a hub at an address; each peer is in a namespace, where it listens at an address."""
    parts = HubParts(watch=watch)
    with rv.Hub("0.0.0.0:0", plan=PLAN, tell=story.tell, look=story.look, parts=parts) as hub:
        port = hub.token.addresses[0].rpartition(":")[2]
        ways = tuple(f"tcp://{each}:{port}" for each in here.split())
        token = write_token(msgspec.structs.replace(hub.token, addresses=ways))
        device = {"flops_per_second": FLOPS_PER_SECOND, "memory_bytes": MEMORY_BYTES}
        story.peers = Peers(token, folder, **device)
        try:
            for name, (space, door) in peers.items():
                story.peers.start(name, space=f"/var/run/netns/{space}", door=f"{door}:0")
            yield hub
            for name in peers:
                assert story.peers.end(name) == 0, story.peers.said(name)
        finally:
            story.peers.close()


def later(seconds: float, words: str) -> None:
    """Run a command after some time, beside the hub that runs here."""
    asyncio.get_running_loop().call_later(seconds, call, words)


def test_a_hub_whose_cable_is_cut_loses_nobody_and_trains_nothing_again(tmp_path: Path) -> None:
    """Other lengths of an outage, and longer ones, are tried on virtual time: tests/system/test_system.py."""
    seconds = 8.0
    names = [f"node{number}" for number in range(3)]

    def cut(story: Story) -> None:
        call(f"ip link set {space} down")
        story.note("the hub's cable is cut")
        later(seconds, f"ip link set {space} up")

    with networks(1) as ((space, here),):
        back = is_news(Returned, len(names))
        story = Story([Step(is_news(EpochDone), cut), Step(is_news(CutOff), bool), Step(back, bool)])
        granted = Granted(story)
        inside = f"{here.removesuffix('.1')}.2"
        with far_swarm(story, tmp_path, granted.see, dict.fromkeys(names, (space, inside)), here=here) as hub:
            result = hub.fit(make_job(), nodes=len(names))
    check(story, result)
    assert story.of(Left, WorkLost, ClusterBroken) == []
    assert len(story.of(Joined)) == len(names)
    assert len(story.of(PlanFormed)) == 1
    assert granted.num_samples == story.of(Trained)[-1].num_samples, "no sample was leased twice"


def test_two_peers_whose_cable_is_cut_train_through_the_relay_and_directly_again(tmp_path: Path) -> None:
    def says(what: str) -> Callable[[Any], bool]:
        """Return what waits for one of the peers that has the cable to say something."""
        return lambda _: any(what in story.peers.said(name) for name in ("node0", "node1"))

    with networks(2) as ((one, here), (other, there)):
        net = f"198.20.{os.getpid() % 250}"
        call(f"ip -netns {one} link add straight type veth peer name straight netns {other}")
        for number, space in enumerate((one, other), 1):
            call(f"ip -netns {space} address add {net}.{number}/30 dev straight")
            call(f"ip -netns {space} link set straight up")
        cable = f"ip -netns {one} link set straight"

        def cut(story: Story) -> None:
            assert "goes through the hub" not in story.peers.said("node0") + story.peers.said("node1")
            call(f"{cable} down")
            story.note("the cable between two peers is cut")

        story = Story(
            [
                Step(is_news(EpochDone), cut),
                Step(says("goes through the hub"), bool),
                Step(is_news(EpochDone), lambda _: call(f"{cable} up")),
                Step(says("is reached directly again"), bool),
            ]
        )
        granted = Granted(story)
        places = {"node0": (one, f"{net}.1"), "node1": (other, f"{net}.2")}
        with far_swarm(story, tmp_path, granted.see, places, here=f"{here} {there}") as hub:
            result = hub.fit(make_job(), nodes=2)
    check(story, result)
    assert story.of(Left, WorkLost, ClusterBroken) == []
    assert granted.num_samples == story.of(Trained)[-1].num_samples
