"""Rounds of real programs: one that freezes is left out of a round, and of no more than that."""

import os
import signal
from contextlib import suppress
from typing import Any

from ravnest.config import HubTimeouts, Timeouts
from ravnest.hub.coordinator.notices import (
    ClusterBroken,
    ClusterStarted,
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
from tests.support.small_swarm import ENDLESS, PLAN, check_books, make_job, stop_run

NUM_SAMPLES, NUM_CLUSTERS = 1536, 3


def form_alone(profile: ModelProfile, swarm: Swarm, _: object, seed: int, plan_id: int) -> Plan:
    """Return a plan of one cluster for each node."""
    clusters = tuple(Cluster((Stage(node.name, 0, profile.num_positions),)) for node in swarm.nodes)
    return Plan(plan_id, seed, clusters, form_rings(clusters, {node.name: node for node in swarm.nodes}), ())


def test_a_peer_that_freezes_in_a_round_is_left_out_of_it_and_goes_on() -> None:
    # The hub shall end the round, after 10 s or more, long before it takes who is silent for dead.
    timeouts = Timeouts(HubTimeouts(grace_seconds=600.0))
    parts = HubParts(SearchPlanner(form=form_alone), timeouts)
    told: list[Notice] = []
    frozen: list[int] = []
    victim = cluster_name(NUM_CLUSTERS - 1)
    # Each waits for a round that ended, in its turn; then the run has shown everything.
    moments = [
        lambda news: len(news_of(told, ClusterStarted)) >= NUM_CLUSTERS,
        lambda news: news.is_committed and news.left_out == (victim,),
        lambda news: news.is_committed and not news.left_out,  # with it
    ]

    def freeze() -> None:
        node = news_of(told, PlanFormed)[0].plan.clusters[-1].stages[-1].node
        frozen.append(swarm.processes[node])
        os.kill(frozen[0], signal.SIGSTOP)

    acts = [freeze, lambda: os.kill(frozen[0], signal.SIGCONT), stop_run]

    def tell(news: Notice) -> None:
        told.append(news)
        if isinstance(news, RoundEnded) and moments and moments[0](news):
            moments.pop(0)
            acts.pop(0)()

    hardware = [Hardware(8e6, emulated_flops_per_second=1e8)] * NUM_CLUSTERS
    swarm: Hub = local(hardware, plan=PLAN, tell=tell, parts=parts)
    with swarm:
        try:
            result = swarm.fit(make_job(ENDLESS, NUM_SAMPLES, average_every=4))
        finally:
            with suppress(ProcessLookupError, IndexError):  # it has ended, as it should
                os.kill(frozen[0], signal.SIGCONT)
    assert not moments, "the run ended before all had happened"
    assert news_of(told, Left) == news_of(told, ClusterBroken) == []
    rounds = news_of(told, RoundEnded)
    assert victim in {name for news in rounds for name, _ in news.blamed}
    check_books([*told], None, NUM_SAMPLES)
    assert rounds[-1].is_final
    assert result.state


def news_of(told: list[Notice], kind: type) -> list[Any]:
    return [news for news in told if isinstance(news, kind)]
