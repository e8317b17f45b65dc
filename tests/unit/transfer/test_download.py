"""People see how far a transfer is, how fast, and how long it still takes."""

from ravnest.transfer.exchange import TransferProgress


def test_the_rest_is_told_by_the_rate_of_the_last_reports() -> None:
    progress = TransferProgress("fetching stage weights", 500_000_000)
    assert progress.describe(114_000_000, 10.0) == "fetching stage weights: 114 MB of 500 MB"
    told = progress.describe(212_000_000, 20.0)
    assert told == progress.told == "fetching stage weights: 212 MB of 500 MB, 9.8 MB/s, 29.4 s left"
    for number in range(1, 7):  # it slows down
        told = progress.describe(212_000_000 + number * 5_000_000, 20.0 + 5 * number)
    assert told == "fetching stage weights: 242 MB of 500 MB, 1 MB/s, 4.3 min left"


def test_what_stands_still_has_no_end() -> None:
    progress = TransferProgress("fetching", 100)
    progress.describe(50, 1.0)
    assert progress.describe(50, 2.0) == "fetching: 50 B of 100 B"
