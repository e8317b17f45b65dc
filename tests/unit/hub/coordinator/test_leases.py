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
    book = LeaseBook(num_samples=10, num_epochs=1)
    leases = [book.lease("a", 4), book.lease("b", 3), book.lease("a", 4)]
    assert leases == [Lease(0, 0, 0, 4, "a"), Lease(1, 0, 4, 7, "b"), Lease(2, 0, 7, 10, "a")]
    assert book.lease("c", 4) is None
    assert [len(book.samples(lease)) for lease in leases] == [4, 3, 3]
    assert sorted(np.concatenate([book.samples(lease) for lease in leases])) == list(range(10))
    assert book.open_leases == tuple(leases)


def test_only_the_open_lease_of_its_holder_counts():
    book = LeaseBook(num_samples=10, num_epochs=1)
    lease = book.lease("a", 4)
    assert "is held by a, not by b" in book.complete(lease.number, "b")
    assert "lease 7 is not open" in book.complete(7, "a")
    assert book.num_counted(0) == 0
    assert book.complete(lease.number, "a") is None
    assert "lease 0 is not open" in book.complete(lease.number, "a")
    assert book.num_counted(0) == 4


def test_released_samples_come_first_under_a_new_number():
    book = LeaseBook(num_samples=10, num_epochs=1)
    lost = [book.lease("a", 2), book.lease("a", 2)]
    book.lease("b", 2)
    assert book.release("a") == tuple(lost)
    assert book.release("a") == ()
    again = [book.lease("b", 3), book.lease("a", 3), book.lease("b", 3)]
    assert [(lease.number, lease.start, lease.stop) for lease in again] == [(3, 0, 3), (4, 3, 4), (5, 6, 9)]
    assert "not open" in book.complete(lost[1].number, "a")  # late, though `a` holds the samples anew
    assert book.num_counted(0) == 0


def test_what_was_lost_comes_in_the_order_of_the_epoch():
    book = LeaseBook(num_samples=10, num_epochs=1)
    for holder in "abcb":
        book.lease(holder, 2)
    book.release("b")
    book.release("a")
    assert book.upcoming == (0, 4)  # of a and b, side by side
    assert [book.lease("d", 3).start for _ in range(4)] == [0, 3, 6, 8]


def test_next_epoch_begins_while_the_tail_is_open_but_none_beyond_the_last():
    book = LeaseBook(num_samples=4, num_epochs=2)
    leases = [book.lease("a", 2) for _ in range(4)]
    assert [(lease.epoch, lease.start) for lease in leases] == [(0, 0), (0, 2), (1, 0), (1, 2)]
    assert book.lease("a", 2) is None
    assert book.upcoming is None
    for lease in leases[1:]:
        assert book.complete(lease.number, "a") is None
    assert (book.num_counted(0), book.num_counted(1)) == (2, 4)
    assert not book.is_finished
    book.complete(leases[0].number, "a")
    assert (book.num_counted(0), book.num_counted(1), book.num_counted(2)) == (4, 4, 0)
    assert book.is_finished


def test_open_leases_survive_a_restart_and_count_once():
    book = LeaseBook(num_samples=10, num_epochs=2, seed=5)
    leases = [book.lease("a", 2), book.lease("b", 2)]
    book.release("b")
    book = LeaseBook.restore(json.loads(json.dumps(book.state())))
    assert book.open_leases == (leases[0],)
    assert book.complete(leases[0].number, "a") is None
    assert "not open" in book.complete(leases[0].number, "a")
    assert "not open" in book.complete(leases[1].number, "b")
    assert book.lease("c", 2) == Lease(2, 0, 2, 4, "c")
    assert book.samples(leases[0]).tolist() == permute(np.arange(2), 10, 5, 0).tolist()


def test_state_does_not_grow_with_the_samples_counted():
    book = LeaseBook(num_samples=1000, num_epochs=10)
    sizes = set()
    for _ in range(5000):
        book.complete(book.lease("a", 1).number, "a")
        state = book.state()
        sizes.add(len(state["open"]) + len(state["requeued"]) + len(state["counted"]))
    assert max(sizes) <= 1
