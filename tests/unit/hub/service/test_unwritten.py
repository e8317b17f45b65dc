"""What follows from an event is done when a store has it: in order, and once."""

from hypothesis import given
from hypothesis import strategies as st

from ravnest.hub.service.unwritten import LogRow, Unwritten


def test_nothing_is_done_before_it_is_written_and_then_in_order() -> None:
    done: list[str] = []
    log = Unwritten(num_written=7)
    log.after(lambda: done.append("nothing was on its way"))
    log.append("Tick", b"8")
    log.after(lambda: done.append("after 8"))
    log.append("Tick", b"9")
    log.after(lambda: done.append("after 9"))
    log.after(lambda: done.append("after 9, too"))
    assert (done, len(log)) == (["nothing was on its way"], 2)
    log.confirm(8)
    assert (done[1:], len(log)) == (["after 8"], 1)
    log.confirm(9)
    assert (done[2:], len(log)) == (["after 9", "after 9, too"], 0)


def test_what_an_act_causes_comes_behind_what_waited_already() -> None:
    done: list[int] = []
    log = Unwritten()

    def cause() -> None:
        log.after(lambda: done.append(3))
        done.append(1)

    log.append("Tick", b"")
    log.after(cause)
    log.after(lambda: done.append(2))
    log.confirm(1)
    assert done == [1, 2, 3]


def test_a_group_has_no_more_than_it_may_but_always_one() -> None:
    log = Unwritten()
    for size in (10, 3, 3, 3):
        log.append("Tick", bytes(size))
    assert [len(row.body) for row in log.group(10, 4)] == [10]
    assert [len(row.body) for row in log.group(3, 100)] == [10, 3, 3]
    log.confirm(1)
    assert [row.number for row in log.group(10, 6)] == [2, 3]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.sampled_from(["told", "lost", "failed"]))))
def test_the_log_is_what_was_appended_and_every_act_is_done_when_the_log_has_its_event(steps) -> None:
    """A store may write a group and die before it says so: it is asked later what it has."""
    log, stored, done, num_appended = Unwritten(), [], [], 0

    def check(number: int) -> None:
        assert len(stored) >= number
        done.append(number)

    for num_new, most, outcome in steps:
        for _ in range(num_new):
            num_appended += 1
            log.append("Tick", str(num_appended).encode())
            log.after(lambda number=num_appended: check(number))
        rows: list[LogRow] = log.group(most, 1 << 20)
        if outcome != "failed":
            assert [row.number for row in rows] == list(range(len(stored) + 1, len(stored) + 1 + len(rows)))
            stored += [row.body for row in rows]
        log.confirm(len(stored))  # what "lost" did not say is found out when it is asked
    assert stored == [str(number).encode() for number in range(1, len(stored) + 1)]
    assert done == list(range(1, len(stored) + 1))
