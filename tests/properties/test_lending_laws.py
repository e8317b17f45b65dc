"""When a PC is lent, for every minute of every day; and what a bucket lets through, whatever is sent."""

from hypothesis import given
from hypothesis import strategies as st

from ravnest.cli.lending_loop import DAY_MINUTES, Hours, may_run, next_start, read_hours, show_minute
from ravnest.net.congestion import UPLOAD_BURST_SECONDS, Upload

MINUTES = st.integers(0, DAY_MINUTES - 1)
SPANS = st.builds(Hours, MINUTES, st.integers(0, DAY_MINUTES)).filter(lambda span: span.start != span.stop)


def walk(span: Hours) -> set[int]:
    """Return the minutes of a span by walking through it, as a clock does."""
    minutes, now = set(), span.start
    while now != span.stop % DAY_MINUTES or not minutes:
        minutes.add(now)
        now = (now + 1) % DAY_MINUTES
    return minutes


@given(st.lists(SPANS, min_size=1, max_size=4), st.booleans())
def test_a_pc_is_lent_at_the_minutes_of_its_hours_and_at_no_others(spans: list[Hours], battery: bool) -> None:
    lent = set().union(*map(walk, spans))
    for minute in range(DAY_MINUTES):
        assert (may_run(minute, spans, battery) is None) == (minute in lent and not battery)


@given(MINUTES, st.booleans())
def test_without_hours_only_the_battery_counts(minute: int, battery: bool) -> None:
    assert may_run(minute, (), battery) == ("it runs on battery" if battery else None)


@given(st.lists(SPANS, min_size=1, max_size=4), MINUTES)
def test_the_next_start_is_the_first_minute_that_is_lent_again(spans: list[Hours], minute: int) -> None:
    if may_run(minute, spans, False) is None:
        return
    start = next_start(minute, spans)
    later = [(minute + passed) % DAY_MINUTES for passed in range((start - minute) % DAY_MINUTES)]
    assert may_run(start, spans, False) is None
    assert all(may_run(each, spans, False) for each in later)


@given(SPANS)
def test_hours_are_read_as_they_are_shown(span: Hours) -> None:
    written = f"{show_minute(span.start)}-{show_minute(span.stop)}"
    assert read_hours(written) == span
    assert str(read_hours(f" {written.replace('-', ' - ')} ")) == written.replace("-", " to ")


@given(
    st.floats(1e3, 1e9),
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 10**6), st.booleans()), max_size=40),
)
def test_what_waits_its_turn_never_sends_more_than_the_rate(
    rate: float, steps: list[tuple[float, int, bool]]
) -> None:
    """Over any span that ends with a sending: rate x seconds, what was saved up, and that last sending."""
    upload, now, sent = Upload(rate), 0.0, []
    for pause, size, is_urgent in steps:
        now += pause
        if not is_urgent:
            now += upload.wait_seconds(now)
            assert upload.wait_seconds(now) == 0
            for first, (began, _) in enumerate(sent):
                before = sum(size for _, size in sent[first:])
                assert before <= rate * (now - began + UPLOAD_BURST_SECONDS) + 2 + 1e-6 * before
        upload.pay([bytes(size)], now)
        sent.append((now, size))
