"""The order of samples, pinned for ever, and the lease book's rules one by one."""

import json

import numpy as np
import pytest

from ravnest.hub.coordinator.leases import Lease, LeaseBook, permute


@pytest.mark.parametrize(
    ("num_samples", "seed", "epoch", "indices", "samples"),
    [
        (10, 0, 0, range(10), [8, 9, 3, 0, 5, 6, 4, 2, 1, 7]),
        (10, 0, 1, range(10), [1, 2, 7, 4, 5, 3, 8, 6, 0, 9]),
        (10, 1, 0, range(10), [4, 2, 9, 8, 6, 0, 1, 3, 5, 7]),
        (1_000_000, 42, 3, [0, 1, 2, 999_999], [908541, 620431, 746532, 688102]),
        (10**12, 42, 3, [0, 10**12 - 1], [645919130186, 677783512531]),
    ],
)
def test_order_is_fixed_for_ever(num_samples, seed, epoch, indices, samples):
    order = permute(np.array(indices), num_samples, seed, epoch)
    assert order.tolist() == samples
    assert order.dtype == np.int64


def test_order_looks_random():
    indices = np.arange(20_000)
    order = permute(indices, 20_000, seed=1, epoch=0)
    assert abs(np.corrcoef(indices, order)[0, 1]) < 0.05
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05


def test_order_of_nothing_is_nothing():
    assert permute(np.array([], dtype=np.int64), 10, 0, 0).tolist() == []


def test_leases_rise_in_number_and_cover_the_epoch():
    book = LeaseBook(num_samples=10, chunk_size=4, num_epochs=1)
    leases = [book.lease("a"), book.lease("b"), book.lease("a")]
    assert leases == [Lease(0, 0, 0, "a"), Lease(1, 0, 1, "b"), Lease(2, 0, 2, "a")]
    assert book.lease("c") is None
    assert [len(book.samples(lease)) for lease in leases] == [4, 4, 2]
    assert sorted(np.concatenate([book.samples(lease) for lease in leases])) == list(range(10))
    assert book.open_leases == tuple(leases)


def test_only_the_open_lease_of_its_holder_counts():
    book = LeaseBook(num_samples=10, chunk_size=4, num_epochs=1)
    lease = book.lease("a")
    assert "is held by a, not by b" in book.complete(lease.number, "b")
    assert "lease 7 is not open" in book.complete(7, "a")
    assert book.num_counted(0) == 0
    assert book.complete(lease.number, "a") is None
    assert "lease 0 is not open" in book.complete(lease.number, "a")
    assert book.num_counted(0) == 4


def test_released_chunks_come_first_under_a_new_number():
    book = LeaseBook(num_samples=10, chunk_size=2, num_epochs=1)
    lost = [book.lease("a"), book.lease("a")]
    book.lease("b")
    assert book.release("a") == tuple(lost)
    assert book.release("a") == ()
    again = [book.lease("b"), book.lease("a"), book.lease("b")]
    assert [(lease.number, lease.chunk) for lease in again] == [(3, 0), (4, 1), (5, 3)]
    assert "not open" in book.complete(lost[1].number, "a")  # late, though `a` holds the chunk anew
    assert book.num_counted(0) == 0


def test_the_latest_loss_goes_to_the_very_front():
    book = LeaseBook(num_samples=10, chunk_size=2, num_epochs=1)
    for holder in "abcb":
        book.lease(holder)
    book.release("a")
    book.release("b")
    assert [book.lease("d").chunk for _ in range(4)] == [1, 3, 0, 4]


def test_next_epoch_begins_while_the_tail_is_open_but_none_beyond_the_last():
    book = LeaseBook(num_samples=4, chunk_size=2, num_epochs=2)
    leases = [book.lease("a") for _ in range(4)]
    assert [(lease.epoch, lease.chunk) for lease in leases] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert book.lease("a") is None
    for lease in leases[1:]:
        assert book.complete(lease.number, "a") is None
    assert (book.num_counted(0), book.num_counted(1)) == (2, 4)
    assert not book.is_finished
    book.complete(leases[0].number, "a")
    assert (book.num_counted(0), book.num_counted(1), book.num_counted(2)) == (4, 4, 0)
    assert book.is_finished


def test_open_leases_survive_a_restart_and_count_once():
    book = LeaseBook(num_samples=10, chunk_size=2, num_epochs=2, seed=5)
    leases = [book.lease("a"), book.lease("b")]
    book.release("b")
    book = LeaseBook.restore(json.loads(json.dumps(book.state())))
    assert book.open_leases == (leases[0],)
    assert book.complete(leases[0].number, "a") is None
    assert "not open" in book.complete(leases[0].number, "a")
    assert "not open" in book.complete(leases[1].number, "b")
    assert book.lease("c") == Lease(2, 0, 1, "c")
    assert book.samples(leases[0]).tolist() == permute(np.arange(2), 10, 5, 0).tolist()


def test_state_does_not_grow_with_the_chunks_done():
    book = LeaseBook(num_samples=1000, chunk_size=1, num_epochs=10)
    sizes = set()
    for _ in range(5000):
        book.complete(book.lease("a").number, "a")
        state = book.state()
        sizes.add(len(state["open"]) + len(state["requeued"]) + len(state["counted"]))
    assert max(sizes) <= 1
