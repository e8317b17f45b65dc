"""Which cluster has a text: the others when it breaks, none when all have failed; and junk is no answer."""

from dataclasses import dataclass, field

import pytest

from ravnest.hub.coordinator.generation import (
    MOST_GENERATIONS,
    Generations,
    RowsAsked,
    StepAsked,
    Unanswered,
)
from ravnest.ids import NodeId
from ravnest.protocol.generation import GenerationAnswer, GenerationEnd, GenerationFault, TokenChoices
from ravnest.protocol.messages import Refusal

ROWS = RowsAsked((3, 2), 2, num_words=10)
GOOD = TokenChoices((4, 1), (2.0, 1.5))


@dataclass
class Cluster:
    name: str
    build_id: int
    samples_per_second: float = 1.0
    is_running: bool = True

    @property
    def cluster_id(self) -> str:
        return f"c{self.name}"

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(NodeId(f"{self.name}{index}") for index in range(3))


@dataclass
class Place:
    clusters: list[Cluster] = field(default_factory=list)

    @property
    def running(self):
        return [each for each in self.clusters if each.is_running]

    def find_cluster(self, cluster_id):
        return next((each for each in self.clusters if each.cluster_id == cluster_id), None)

    def fields(self, cluster, is_evaluation):
        assert is_evaluation
        return ((cluster.nodes[0], ("ids",)),)


@pytest.fixture
def place() -> Place:
    return Place([Cluster("a", 7), Cluster("b", 8, 2.0)])


def answer(step: StepAsked, *rows: TokenChoices) -> GenerationAnswer:
    return GenerationAnswer(step.build_id, step.generation, step.step, rows or (GOOD, GOOD))


def test_a_text_stays_with_its_cluster_and_only_new_places_cross(place):
    machine = Generations(place)
    text = machine.open()
    first = machine.ask(text, ROWS)
    assert (first.build_id, first.step, first.first, first.nodes) == (8, 0, 0, ("b0", "b1", "b2"))
    assert first.fields == (("b0", ("ids",)),)
    assert machine.receive("b2", answer(first)) == (GOOD, GOOD)
    second = machine.ask(text, ROWS)
    assert (second.generation, second.step, second.first) == (first.generation, 1, ROWS.first)
    other = machine.open()
    assert machine.ask(other, ROWS).build_id == 7, "a second text goes where none is"
    assert machine.close(text) == (("b0", "b1", "b2"), GenerationEnd(8, first.generation))


def test_only_the_leaf_of_the_step_under_way_is_heard(place):
    machine = Generations(place)
    text = machine.open()
    step = machine.ask(text, ROWS)
    for sender, message in (
        ("b1", answer(step)),
        ("a2", answer(step)),
        ("b2", GenerationAnswer(8, step.generation + 1, 0, (GOOD, GOOD))),
        ("b2", GenerationAnswer(8, step.generation, 1, (GOOD, GOOD))),
        ("b2", GenerationAnswer(7, step.generation, 0, (GOOD, GOOD))),
        ("a0", GenerationFault(8, step.generation, 0, "no")),
    ):
        assert isinstance(machine.receive(sender, message), Refusal)
    assert machine.receive("b2", answer(step)) == (GOOD, GOOD)
    assert isinstance(machine.receive("b2", answer(step)), Refusal), "a second answer"


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ((GOOD,), "1 rows instead of 2"),
        ((GOOD, TokenChoices((10,), (1.0,))), "word 10 of 10"),
        ((GOOD, TokenChoices((1, 2), (1.0,))), "do not fit"),
        ((GOOD, TokenChoices((1, 1), (2.0, 1.0))), "do not fit"),
        ((GOOD, TokenChoices((1, 2), (1.0, 2.0))), "not in order"),
        ((GOOD, TokenChoices((1,), (float("nan"),))), "not finite"),
    ],
)
def test_junk_of_a_leaf_is_no_answer_and_another_cluster_is_asked(place, rows, told):
    machine = Generations(place)
    text = machine.open()
    step = machine.ask(text, ROWS)
    found = machine.receive("b2", answer(step, *rows))
    assert isinstance(found, Unanswered)
    assert told in found.reason
    again = machine.ask(text, ROWS)
    assert (again.build_id, again.step, again.first) == (7, 0, 0)
    assert again.generation != step.generation, "a late answer is dropped by number"


def test_a_cluster_that_breaks_or_is_built_anew_loses_the_text(place):
    machine = Generations(place)
    text = machine.open()
    machine.ask(text, ROWS)
    assert machine.follow() == []
    place.clusters[1].is_running = False
    [(gone, found)] = machine.follow()
    assert (gone, found) == (text, Unanswered("cluster b broke"))
    machine.ask(text, ROWS)
    place.clusters[0].build_id = 9
    assert [why.reason for _, why in machine.follow()] == ["cluster a broke"]
    assert machine.ask(text, ROWS).build_id == 9, "it is another one now"


def test_when_nothing_runs_it_waits_and_when_all_have_failed_it_ends(place):
    machine = Generations(place)
    text = machine.open()
    for _ in range(2):
        machine.ask(text, ROWS)
        machine.expire(text, 60.0)
    found = machine.ask(text, ROWS)
    assert found == Unanswered("cluster b gave no answer in 60 s; cluster a gave no answer in 60 s", True)
    place.clusters.clear()
    assert Generations(place).ask(Generations(place).open(), ROWS) == Unanswered("no cluster is running")
    machine = Generations(place)
    for _ in range(MOST_GENERATIONS):
        machine.open()
    assert machine.open() == "8 texts are being written already; ask again when one of them is done"
