"""Laws of the sampler: a bijection per epoch, and every sample counted once whatever happens."""

import json
from collections import Counter
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ravnest.hub.coordinator.leases import LeaseBook, permute


@given(st.integers(1, 700), st.integers(-5, 2**70), st.integers(0, 50))
def test_order_is_a_bijection(num_samples, seed, epoch):
    order = permute(np.arange(num_samples), num_samples, seed, epoch)
    assert sorted(order.tolist()) == list(range(num_samples))


@given(st.integers(30, 700), st.integers(0, 2**32), st.integers(0, 50))
def test_order_differs_per_epoch_and_seed(num_samples, seed, epoch):
    indices = np.arange(num_samples)
    orders = [
        permute(indices, num_samples, *key) for key in ((seed, epoch), (seed, epoch + 1), (seed + 1, epoch))
    ]
    assert len({tuple(order.tolist()) for order in orders}) == 3


@given(st.integers(1, 700), st.integers(0, 2**32), st.data())
def test_order_of_an_index_does_not_depend_on_the_others(num_samples, seed, data):
    whole = permute(np.arange(num_samples), num_samples, seed, 0)
    index = data.draw(st.integers(0, num_samples - 1))
    assert permute(np.array([index]), num_samples, seed, 0)[0] == whole[index]


class History:
    """Random joins, crashes, restarts and late or double acknowledgements around one book."""

    def __init__(self, book: LeaseBook, random: Random, most: int, num_total: int) -> None:
        self.book, self.random, self.num_total = book, random, num_total
        self.most = most  # samples of a lease
        self.held = {"c0": []}  # by clusters that are alive
        self.stray = []  # leases that were counted or lost: their acknowledgement must not count
        self.counted = Counter()
        self.num_joined = 1

    def step(self) -> None:
        name = self.random.choice(sorted(self.held))
        match self.random.choices(
            ["lease", "complete", "crash", "join", "restart", "stray", "thief"],
            [40, 40, 4, 4, 4, 4, 4],
        )[0]:
            case "lease":
                self.lease(name)
            case "complete" if self.held[name]:
                lease = self.held[name].pop(self.random.randrange(len(self.held[name])))
                assert self.book.complete(lease.number, name) is None
                self.stray.append(lease)
                self.counted.update((lease.epoch, x) for x in self.book.samples(lease).tolist())
            case "crash" if len(self.held) > 1:
                lost = self.held.pop(name)
                assert Counter(self.book.release(name)) == Counter(lost)
                self.stray.extend(lost)
            case "join":
                # Half of them come back under an old name.
                oldest = self.random.choice([0, self.num_joined])
                self.held.setdefault(f"c{self.random.randint(oldest, self.num_joined)}", [])
                self.num_joined += 1
            case "restart":
                self.restart()
            case "stray" if self.stray:
                lease = self.random.choice(self.stray)
                assert self.book.complete(lease.number, lease.cluster_id) is not None
            case "thief":
                others = [lease for key in self.held if key != name for lease in self.held[key]]
                if others:
                    assert self.book.complete(self.random.choice(others).number, name) is not None

    def restart(self) -> None:
        self.book = LeaseBook.restore(json.loads(json.dumps(self.book.state())), self.num_total)

    def finish(self) -> None:
        for _ in range(20_000):
            if self.book.is_finished:
                break
            self.step()
            per_epoch = Counter(epoch for epoch, _ in self.counted)
            for epoch in range(4):
                assert self.book.num_counted(epoch) == per_epoch[epoch]
        assert self.book.is_finished
        assert not self.book.under_way
        assert self.book.lease("c0", 1) is None

    def lease(self, name: str) -> None:
        is_all_out = len(self.held[name]) >= 3
        if is_all_out:
            return
        lease = self.book.lease(name, self.random.randint(1, self.most))
        if lease is not None:
            self.held[name].append(lease)


@given(
    st.integers(1, 60),
    st.integers(1, 17),
    st.integers(1, 3),
    st.integers(0, 2**32),
    st.integers(0),
    st.data(),
)
def test_every_sample_of_every_epoch_counts_once(num_samples, most, num_epochs, seed, key, data):
    num_total = data.draw(st.integers(1, num_epochs * num_samples))
    book = LeaseBook(num_samples, num_epochs, key, num_total)
    history = History(book, Random(seed), most, num_total)
    history.finish()
    assert len(history.counted) == num_total
    history.num_total = 0  # the job goes on, to the end of its epochs
    history.restart()
    history.finish()
    wanted = {(epoch, sample) for epoch in range(num_epochs) for sample in range(num_samples)}
    assert set(history.counted) == wanted
    assert set(history.counted.values()) == {1}
