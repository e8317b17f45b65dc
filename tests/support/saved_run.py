"""Checkpoints of a small made-up training: two stages that share a weight, and books that balance."""

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import save

from ravnest.hub.coordinator.leases import LeaseBook
from ravnest.requester.checkpoint_store import Checkpoint, Fingerprint, SavedLedger

JOB = Fingerprint("toy", "ab" * 32, num_samples=20, batch_size=4, epochs=3, seed=7)


def books_of(number: int, num_done: int = 6, num_back: int = 1, **changes: object) -> SavedLedger:
    """The books after so many leases were completed, and so many others given back."""
    book = LeaseBook(JOB.num_samples, JOB.epochs, JOB.seed)
    leases = [book.lease(str(place < num_back), 8) for place in range(num_back + num_done)]
    for lease in leases[num_back:]:
        assert lease is not None
        assert book.complete(lease.number, "False") is None
    book.release("True")
    counted = sum(book.num_counted(epoch) for epoch in range(JOB.epochs))
    history = [{"epoch": 1, "loss": 0.1 * number, "accuracy": None}]
    plain = SavedLedger(number, JOB, counted, counted + 4, 5, 1, book.state(), history, 1.5e9)
    return msgspec.structs.replace(plain, **changes)


def parts_of(number: int) -> list[tuple[int, int, bytes]]:
    """The state of two stages, with the number as every value; the second has a copy of a tied weight."""
    value = np.float32(number)
    first = {"tied": np.full((2, 3), value), "optimizer/momentum/tied": np.full((2, 3), value)}
    second = {"tied": np.full((2, 3), -value), "bias": np.full(2, value), "seen": np.array(number)}
    return [(0, 2, save(first)), (2, 5, save(second))]


def check_content(found: Checkpoint | None, number: int) -> None:
    """The checkpoint is this one, to the bit."""
    assert found is not None
    assert found.number == found.books.number == number
    assert msgspec.to_builtins(found.books) == msgspec.to_builtins(books_of(number))
    tensors = {saved.name: (saved.dtype, saved.shape, bytes(saved.buffer)) for saved in found.read()}
    six = ("float32", (2, 3), np.full(6, number, np.float32).tobytes())
    assert tensors == {
        "tied": six,
        "optimizer/momentum/tied": six,
        "bias": ("float32", (2,), np.full(2, number, np.float32).tobytes()),
        "seen": ("int64", (), np.int64(number).tobytes()),
    }


def write_beside(folder: Path, kind: str, body: bytes) -> None:
    """Write an event into the log of a hub as another program would, while the hub has it open."""
    with closing(sqlite3.connect(folder / "hub.sqlite", isolation_level=None)) as database:
        database.execute("INSERT INTO events (kind, body) VALUES (?, ?)", (kind, body))
