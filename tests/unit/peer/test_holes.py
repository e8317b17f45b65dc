"""Freed memory between tensors: when it is given back, and how compute is started so that there is little."""

import mmap

from ravnest.peer.compute_process import choose_environment
from ravnest.peer.machine import HoleWatch, kept_bytes, own_memory_bytes


def test_memory_is_given_back_when_there_is_more_than_was_needed_and_what_may_be_kept() -> None:
    watch = HoleWatch(lent_bytes=200, own_bytes=0)  # ten may be kept
    assert watch.look(100)
    watch.record(95)
    assert [watch.look(taken) for taken in (105, 95, 105, 106)] == [False, False, False, True]
    watch.record(104)
    assert [watch.look(taken) for taken in (114, 115)] == [False, True], "from what was left"


def test_holes_within_what_was_needed_stay_and_what_was_needed_long_ago_is_forgotten() -> None:
    watch = HoleWatch(lent_bytes=200, own_bytes=0)
    watch.record(100)
    assert not any(watch.look(taken) for taken in (20, 100) * 5), "pieces of work take and free as much again"
    assert not any(watch.look(20) for _ in range(1000))
    assert watch.look(40)


def test_a_twentieth_of_what_is_used_is_kept_but_for_small_stages() -> None:
    assert kept_bytes(2e9) == kept_bytes(2e9, 1.9e9) == 1 << 25
    assert kept_bytes(2e9, 1.5e8) == 7_500_000
    assert kept_bytes(2e9, 2e7) == kept_bytes(2e9, -1e6) == 1 << 22
    assert kept_bytes(4e7, 2e7) == kept_bytes(4e7) == 2_000_000, "never more than of what is lent"


def test_what_is_kept_grows_with_what_a_stage_uses_beside_the_program() -> None:
    watch = HoleWatch(lent_bytes=2e9, own_bytes=1e8)
    watch.record(2.9e8)
    assert [watch.look(taken) for taken in (2.99e8, 3.01e8)] == [False, True]


def test_a_program_knows_its_own_memory() -> None:
    before, size_bytes = own_memory_bytes(), 1 << 25
    # Straight from the kernel: the allocator may have as much that was freed before.
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        held.write(b"x" * size_bytes)
        assert own_memory_bytes() - before > 0.9 * size_bytes


def test_compute_joins_splinters_unless_its_provider_has_set_the_allocator() -> None:
    assert choose_environment({}, None)["GLIBC_TUNABLES"] == "glibc.malloc.tcache_count=0"
    own = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}
    assert choose_environment(own, None)["GLIBC_TUNABLES"] == own["GLIBC_TUNABLES"]
