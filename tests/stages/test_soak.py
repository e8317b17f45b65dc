"""The soak can fail: it finds a run that is stuck, memory that grows, a loss that does not fall."""

from collections.abc import Callable

import pytest

from benchmarks.scenarios.soak import NUM_SAMPLES, Seen, find_stuck, judge, summarise
from ravnest.hub.coordinator.notices import EpochDone, WorkLost

SECONDS = 600.0
TIMES = [2.0 * number for number in range(300)]


def make_seen() -> Seen:
    """Return what a good run looks like."""
    return Seen(
        samples=[(at, int(100 * at)) for at in TIMES],
        losses=[(at, 2 / (1 + at / 60)) for at in TIMES],
        memory={"hub": [(at, 400_000_000) for at in TIMES], "node0": [(at, 300_000_000) for at in TIMES]},
        news=[EpochDone(epoch, NUM_SAMPLES, 0, 1.0) for epoch in range(1, 12)],
    )


def stop_counting(seen: Seen) -> None:
    seen.samples = [(at, min(count, 20_000)) for at, count in seen.samples]


def leak(seen: Seen) -> None:
    seen.memory["node0"] = [(at, int(3e8 * (1 + 0.2 * at / SECONDS))) for at in TIMES]


def learn_no_more(seen: Seen) -> None:
    seen.losses = [(at, max(loss, 0.5)) for at, loss in seen.losses]


def drop_some(seen: Seen) -> None:
    seen.news[3] = EpochDone(4, NUM_SAMPLES, 16, 1.0)


def count_twice(seen: Seen) -> None:
    seen.news.append(EpochDone(4, NUM_SAMPLES, 0, 1.0))


def test_a_good_run_has_no_fault() -> None:
    assert judge(make_seen(), SECONDS) == []
    assert summarise(make_seen(), SECONDS)["epochs"] == 11


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (stop_counting, "nothing was trained for 60 s from second 200"),
        (leak, "the memory of node0 grew by"),
        (learn_no_more, "the loss did not fall"),
        (drop_some, "did not count every sample once"),
        (count_twice, "counted twice"),
    ],
)
def test_a_bad_run_is_told_by_one_sentence(spoil: Callable[[Seen], None], words: str) -> None:
    seen = make_seen()
    spoil(seen)
    (sentence,) = judge(seen, SECONDS)
    assert words in sentence


def test_a_run_that_began_again_from_a_checkpoint_is_not_stuck_while_it_counts() -> None:
    samples = [(at, int(100 * at) if at < 300 else int(100 * (at - 200))) for at in TIMES]
    assert find_stuck(samples, 60.0) is None
    seen = make_seen()
    count_twice(seen)
    seen.news.append(WorkLost(100))
    assert judge(seen, SECONDS) == []
