"""Rounds of real programs: one that freezes is left out of a round, and of no more than that."""

import os
import signal
from contextlib import suppress
from typing import Any

from ravnest.config import HubTimeouts, Timeouts
from ravnest.hub.coordinator.notices import (
    ClusterBroken,
    ClusterStarted,
    EpochDone,
    Left,
    Notice,
    PlanFormed,
    RoundEnded,
)
from ravnest.hub.coordinator.planner import SearchPlanner
from ravnest.hub.service.server import HubParts
from ravnest.plan.assembly import form_rings
from ravnest.plan.types import Cluster, ModelProfile, Plan, Stage, Swarm, cluster_name
from ravnest.requester.local_peers import Hardware
from ravnest.requester.session import Hub, local
from tests.support.small_swarm import PLAN, make_job

NUM_SAMPLES, EPOCHS, NUM_CLUSTERS = 1536, 2, 3


def form_alone(profile: ModelProfile, swarm: Swarm, _: object, seed: int, plan_id: int) -> Plan:
    """Return a plan of one cluster for each node."""
    clusters = tuple(Cluster((Stage(node.name, 0, profile.num_positions),)) for node in swarm.nodes)
    return Plan(plan_id, seed, clusters, form_rings(clusters, {node.name: node for node in swarm.nodes}), ())


def test_a_peer_that_freezes_in_a_round_is_left_out_of_it_and_goes_on() -> None:
    # The hub shall end the round long before it takes who is silent for dead.
    timeouts = Timeouts(HubTimeouts(round_seconds=1.0, grace_seconds=60.0))
    parts = HubParts(SearchPlanner(form=form_alone), timeouts)
    told: list[Notice] = []
    frozen: list[int] = []

    def tell(news: Notice) -> None:
        told.append(news)
        is_running = len(news_of(told, ClusterStarted)) == NUM_CLUSTERS
        if isinstance(news, RoundEnded) and is_running and not news.is_final and not frozen:
            victim = news_of(told, PlanFormed)[0].plan.clusters[-1].stages[-1].node
            frozen.append(swarm.processes[victim])
            os.kill(frozen[0], signal.SIGSTOP)
        elif isinstance(news, RoundEnded) and news.is_committed and news.left_out:
            os.kill(frozen[0], signal.SIGCONT)

    hardware = [Hardware(8e6, emulated_flops_per_second=1e8)] * NUM_CLUSTERS
    swarm: Hub = local(hardware, plan=PLAN, tell=tell, parts=parts)
    with swarm:
        try:
            result = swarm.fit(make_job(EPOCHS, NUM_SAMPLES, average_every=4))
        finally:
            with suppress(ProcessLookupError, IndexError):  # it has ended, as it should
                os.kill(frozen[0], signal.SIGCONT)
    assert news_of(told, Left) == news_of(told, ClusterBroken) == []
    rounds, left_out = news_of(told, RoundEnded), cluster_name(NUM_CLUSTERS - 1)
    assert {name for news in rounds for name, _ in news.blamed} == {left_out}
    without = [news for news in rounds if news.left_out == (left_out,)]
    assert without[0].is_committed  # at once, by the others
    later = rounds[rounds.index(without[-1]) + 1 :]
    assert any(news.is_committed and not news.is_final for news in later)  # with it
    done = [(news.num_samples, news.num_dropped) for news in news_of(told, EpochDone)]
    assert done == [(NUM_SAMPLES, 0)] * EPOCHS
    assert result.state


def news_of(told: list[Notice], kind: type) -> list[Any]:
    return [news for news in told if isinstance(news, kind)]
