"""Freed memory between tensors: when it is given back, and how compute is started so that there is little."""

import mmap

from ravnest.peer.compute_process import choose_environment
from ravnest.peer.machine import HoleWatch, own_memory_bytes


def test_memory_is_given_back_when_it_has_grown_by_what_may_be_kept() -> None:
    watch = HoleWatch(kept_bytes=10)
    assert [watch.look(taken) for taken in (100, 90, 100, 101)] == [False, False, False, True]
    assert [watch.look(taken) for taken in (98, 108, 109)] == [False, False, True], "from what was left"


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
