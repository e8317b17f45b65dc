"""Nobody that is honest is ever named: over random histories of joins, deaths, slowness and restarts."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import pick
from support.hub_world import HubWorld, Trouble, check_replay, job
from support.plan_world import node

from ravnest.config import Averaging
from ravnest.hub.coordinator.events import Evict
from ravnest.hub.coordinator.notices import Contradicted, ResultRefused, WorkUndone

NAMES, RESCUE, LATE = "abcdef", ("x", "y", "z"), 400.0


class HonestWorld(HubWorld):
    """A world that remembers whom the hub sends away for a fault."""

    def __init__(self, *given, **facts):
        self.faults = []
        super().__init__(*given, **facts)

    def _carry_out(self, order):
        if isinstance(order, Evict) and order.is_fault:
            self.faults.append(order)
        super()._carry_out(order)


def far_away(name, memory_mb):
    slow = {"upload_bytes_per_second": 1e6, "download_bytes_per_second": 1e6, "latency_seconds": 0.2}
    return replace(node(name, memory_mb), **slow)


moments = st.floats(0.0, 60.0)


@settings(max_examples=pick(10, 200))
@given(
    seed=st.integers(0, 2**31),
    averaging=st.sampled_from([Averaging.BLOCKING, Averaging.BLOCKING, Averaging.OVERLAPPED]),
    is_alone=st.booleans(),
    joins=st.lists(st.tuples(st.sampled_from(NAMES), moments), min_size=2, max_size=6),
    deaths=st.lists(st.tuples(st.sampled_from(NAMES), moments), max_size=3),
    slow=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from([0.3, 3.0, 10.0]), moments), max_size=3),
    restarts=st.lists(moments, max_size=2),
    latency=st.sampled_from([0.0, 0.1, 1.0]),
    dropped=st.sampled_from([0.0, 0.1]),
    no_votes=st.sampled_from([0.0, 0.1]),
)
def test_no_honest_node_is_ever_struck(
    seed, averaging, is_alone, joins, deaths, slow, restarts, latency, dropped, no_votes
):
    asked = job(num_samples=120, average_every=2, checkpoint_every=5.0, draw_seed=seed)
    asked = replace(asked, config=replace(asked.config, averaging=averaging))
    trouble = Trouble(seed=seed, latency=latency, twice=0.1, dropped=dropped, gives_up=no_votes)
    world = HonestWorld(asked, trouble, make_node=far_away if is_alone else node)
    for name, at in joins:
        world.join(name, memory_mb=900.0 if is_alone else 250.0, at=at)
    for name, at in deaths:
        world.kill(name, at=at)
    for name, times, at in slow:
        world.slow(name, times, at=at)
    for at in restarts:
        world.restart(at=max(1.0, at))
    world.join(*RESCUE, memory_mb=900.0, at=LATE)
    world.run()
    assert world.is_finished
    assert world.faults == []
    assert not world.told(Contradicted)
    assert not world.told(ResultRefused)
    assert not world.told(WorkUndone)
    check_replay(world)
