"""Rounds under faults, on virtual time: at every step of a round a member dies, freezes or is cut off, or one
message comes late or twice or is overtaken. Whatever happens, the owners of a segment end with the same bits,
training goes on, and a later round commits.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from ravnest.config import Averaging, WireFormat
from ravnest.hub.coordinator.notices import EpochDone, Left, RoundEnded
from ravnest.ids import NodeId
from ravnest.plan.assembly import form_rings
from ravnest.plan.types import Cluster, ModelProfile, Plan, Stage, Swarm, cluster_name
from ravnest.protocol.averaging import RingPart, RoundCommit, RoundOpen, RoundReady
from ravnest.protocol.messages import Message
from tests.support.effort import IS_THOROUGH
from tests.support.system_world import PLAN, Ended, Pc, World, make_job

FIRST = 2  # the round in which faults begin: the first whose base is an average
ARRIVES_SECONDS = 0.05  # by then a small message is there
NUM_CLUSTERS = 3
FP32 = {"activations": WireFormat.FP32, "gradients": WireFormat.FP32}


def form_three(profile: ModelProfile, swarm: Swarm, _: object, seed: int, epoch: int = 0) -> Plan:
    """Return two clusters of two with unlike cuts, and one of one; or less, of who is here."""
    length, names = profile.num_positions, [node.name for node in swarm.nodes]
    clusters = []
    for cut in (length // 3, 2 * length // 3):
        if len(names) > 1:
            root, leaf = names.pop(0), names.pop(0)
            clusters.append(Cluster((Stage(root, 0, cut, 2, **FP32), Stage(leaf, cut, length, **FP32))))
    clusters += [Cluster((Stage(name, 0, length),)) for name in names]
    nodes = {node.name: node for node in swarm.nodes}
    return Plan(epoch, seed, tuple(clusters), form_rings(tuple(clusters), nodes), ())


Matches = Callable[[Message], bool]


def part_of(hops: int) -> Matches:
    return lambda message: isinstance(message, RingPart) and message.hops == hops


def of_kind(kind: type) -> Matches:
    return lambda message: isinstance(message, kind)


@dataclass(frozen=True)
class Step:
    """A message of the round, whose end of it is struck, and whether before it leaves or once it is there."""

    matches: Matches
    strikes_receiver: bool = False
    is_after: bool = False


STEPS = {
    "before it hears of the round": Step(of_kind(RoundOpen), strikes_receiver=True),
    "after its first part": Step(part_of(1), is_after=True),
    "while sums go round": Step(part_of(NUM_CLUSTERS - 1)),
    "before its first mean": Step(part_of(NUM_CLUSTERS)),
    "after its last mean": Step(part_of(2 * NUM_CLUSTERS - 2), is_after=True),
    "before its vote": Step(of_kind(RoundReady)),
    "after its vote": Step(of_kind(RoundReady), is_after=True),
    "before it hears of the commit": Step(of_kind(RoundCommit), strikes_receiver=True),
    "after it heard of the commit": Step(of_kind(RoundCommit), strikes_receiver=True, is_after=True),
}
Deed = Callable[["Story", World, NodeId], Sequence[float] | None]  # to a victim, or when the message leaves
ENDS: dict[str, Deed] = {  # the hub gives the victim up
    "kill": lambda _, world, name: world.kill(name),
    "power cut": lambda _, world, name: world.kill(name, is_silent=True),
    "long freeze": lambda _, world, name: world.freeze(name, 15.0),
    "long partition": lambda _, world, name: world.isolate(name, 15.0),
}
BLOWS: dict[str, Deed] = {  # the victim goes on
    "freeze": lambda _, world, name: world.freeze(name, 3.0),
    "short partition": lambda _, world, name: world.isolate(name, 1.0, resets=False),
    "reset": lambda _, world, name: world.isolate(name, 0.0),
    "partition": lambda _, world, name: world.isolate(name, 3.0),
}
MESSAGES: dict[str, Deed] = {
    "late": lambda *_: (3.0,),
    "twice": lambda *_: (0.0, 0.2),
    "late, then twice": lambda *_: (0.3, 2.0),
}
PAST_THE_DEADLINE: Deed = lambda *_: (30.0,)  # noqa: E731 - like the others


@dataclass
class Story:
    """Does one deed a round at the same step of each, and remembers who was asked for which round."""

    step: Step
    deeds: list[Deed]
    struck: list[int] = field(default_factory=list)  # the rounds
    victims: list[NodeId] = field(default_factory=list)
    asked: dict[int, set[NodeId]] = field(default_factory=dict)
    held: dict[tuple[NodeId, NodeId], float] = field(default_factory=dict)

    def leaving(self, world: World, sender: NodeId, to: NodeId, message: Message) -> Sequence[float]:
        round_id = getattr(message, "round_id", 0)
        if isinstance(message, RoundOpen):
            self.asked.setdefault(round_id, set()).add(to)
        is_new = round_id >= FIRST and round_id not in self.struck
        copies: Sequence[float] | None = None
        if self.deeds and is_new and self.step.matches(message):
            self.struck.append(round_id)
            self.victims.append(to if self.step.strikes_receiver else sender)
            copies = self._strike(world, self.deeds.pop(0))
        return self._in_order(world.now, (sender, to), message, copies or (0.0,))

    def _strike(self, world: World, deed: Deed) -> Sequence[float] | None:
        strike = partial(deed, self, world, self.victims[-1])
        if not self.step.is_after or deed in (PAST_THE_DEADLINE, *MESSAGES.values()):
            return strike()
        asyncio.get_running_loop().call_later(ARRIVES_SECONDS, strike)
        return None

    def _in_order(
        self, now: float, way: tuple[NodeId, NodeId], message: Message, copies: Sequence[float]
    ) -> Sequence[float]:
        """Let nothing overtake on a link but parts of rings, whose order does not matter."""
        if isinstance(message, RingPart):
            return copies
        least = max(self.held.get(way, 0.0) - now, 0.0)
        if least or copies[0]:
            self.held[way] = now + max(least, copies[0]) + 1e-6
        return [max(least, seconds) for seconds in copies]


def run_story(story: Story, averaging: Averaging, num_samples: int) -> Ended:
    job = make_job("tiny", num_samples=num_samples, epochs=1, average_every=2, validates=False)
    plan = replace(PLAN, averaging=averaging)
    world = World(job, [Pc(1e6, 0.01)] * 5, plan=plan, leaving=story.leaving, form_plan=form_three)
    ended = world.run()
    assert ended.result is not None
    assert story.deeds == []
    check_rounds(world, ended, story)
    (done,) = ended.of(EpochDone)
    assert (done.num_samples, done.num_dropped) == (num_samples, 0)
    return ended


def check_rounds(world: World, ended: Ended, story: Story) -> None:
    """A round that committed did so with the same bits in all who took part and live; others in nobody."""
    gone = {news.node for news in ended.of(Left)}
    rounds = ended.of(RoundEnded)
    for news in rounds:
        held = {key: found for key, found in world.anchors.held.items() if key[0] == news.round_id}
        if not news.is_committed:
            assert held == {}, news
            continue
        assert all(len(set(found.values())) == 1 for found in held.values()), news
        holders = {name for found in held.values() for name in found}
        assert story.asked[news.round_id] - gone <= holders <= story.asked[news.round_id], news
    assert any(news.is_committed and not news.is_final for news in rounds[story.struck[-1] :])
    assert rounds[-1].is_final
    assert rounds[-1].is_committed


def blamed(ended: Ended) -> set[str]:
    return {name for news in ended.of(RoundEnded) for name, _ in news.blamed}


def blocks(*words: str) -> Averaging:
    """Half of the worlds average the one way, half the other."""
    return Averaging.BLOCKING if sum(map(len, words)) % 2 else Averaging.OVERLAPPED


# Each step has two of the four ends, in turn; `make fuzz` tries all.
STEPS_AND_ENDS = [
    pytest.param(step, end, id=f"{step}, {end}")
    for number, step in enumerate(STEPS)
    for place, end in enumerate(ENDS)
    if (number + place) % 2 == 0 or IS_THOROUGH
]


@pytest.mark.parametrize(("step", "end"), STEPS_AND_ENDS)
def test_a_member_that_ends_in_a_round_costs_its_cluster_and_the_others_agree(step: str, end: str) -> None:
    story = Story(STEPS[step], [ENDS[end]])
    ended = run_story(story, blocks(step, end), num_samples=560)
    assert [news.node for news in ended.of(Left)] == story.victims
    assert blamed(ended) == set()


@pytest.mark.parametrize("step", STEPS)
def test_a_member_that_is_away_for_a_moment_costs_nothing(step: str) -> None:
    story = Story(STEPS[step], [*BLOWS.values()])
    ended = run_story(story, blocks(step), num_samples=960)
    assert ended.of(Left) == []
    assert blamed(ended) == set()
    assert all(news.is_committed for news in ended.of(RoundEnded))


@pytest.mark.parametrize("step", STEPS)
def test_a_message_that_comes_late_or_twice_changes_nothing(step: str) -> None:
    story = Story(STEPS[step], [*MESSAGES.values()])
    ended = run_story(story, blocks(step), num_samples=960)
    assert ended.of(Left) == []
    assert blamed(ended) == set()
    assert all(news.is_committed for news in ended.of(RoundEnded))


@pytest.mark.parametrize("step", ["before it hears of the round", "after its first part", "before its vote"])
def test_who_is_late_past_the_deadline_is_left_out_and_comes_back(step: str) -> None:
    story = Story(STEPS[step], [PAST_THE_DEADLINE])
    ended = run_story(story, blocks(step), num_samples=1920)
    assert ended.of(Left) == []
    clusters = [{stage.node for stage in cluster.stages} for cluster in ended.plan.clusters]
    (late,) = (number for number, names in enumerate(clusters) if story.victims[0] in names)
    assert blamed(ended) == {cluster_name(late)}
    rounds = ended.of(RoundEnded)
    assert [news.is_committed for news in rounds[FIRST - 1 : FIRST + 1]] == [False, True]
    assert story.asked[FIRST + 1] == story.asked[FIRST] - clusters[late]  # at once, without it
    again = [story.asked[news.round_id] for news in rounds[FIRST:] if news.is_committed]
    assert any(clusters[late] <= names for names in again)
