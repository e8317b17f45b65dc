"""What `ravnest join` says of a PC: what is stated, and what is only guessed."""

import pytest

from ravnest.cli.join import _Listening, _make_offer, _Stated, join
from ravnest.peer.agent import Offer
from ravnest.peer.compute_frames import Surveyed
from ravnest.protocol.membership import Fact
from ravnest.units import Dimension, parse_quantity

ALL = tuple(Fact)


@pytest.mark.parametrize("stated", ALL)
def test_join_says_what_it_only_guesses_and_which_device_it_lends(stated: Fact) -> None:
    surveyed = Surveyed("cuda:1", 8e9, 7e9)
    speed = 1e9 if stated is Fact.SPEED else None
    bandwidth = 5e6 if stated is Fact.BANDWIDTH else None
    latency = 0.0 if stated is Fact.LATENCY else None
    said = _Stated("auto", None, speed, None, bandwidth, latency)
    offer = _make_offer("a", said, _Listening("", (), True), 60.0, surveyed)
    assert set(offer.guessed) == set(ALL) - {stated}
    assert offer.limits.device == "cuda:1"
    assert offer.limits.memory_bytes == offer.node.memory_bytes == 8e9
    assert offer.node.flops_per_second == (1e9 if stated is Fact.SPEED else 7e9)
    assert offer.limits.flops_per_batch == 600 * offer.node.flops_per_second
    if stated is Fact.BANDWIDTH:
        assert offer.node.upload_bytes_per_second == offer.node.download_bytes_per_second == 5e6
    if stated is Fact.LATENCY:
        assert offer.node.latency_seconds == 0.0


def test_a_peer_waits_ten_minutes_for_a_hub_that_is_away() -> None:
    """As long as a hub whose PC is lost may take to be there again, if nobody says otherwise."""
    (patience,) = (each for each in join.params if each.name == "patience")
    assert parse_quantity(patience.default, Dimension.SECONDS) == 600.0
    said = _Stated("cpu", 1e9, 1e9, 1e9, 1e6, 0.0)
    offer = _make_offer("a", said, _Listening("", (), True), 600.0, Surveyed("cpu", 8e9, None))
    assert offer.patience_seconds == Offer(offer.node, offer.limits, ()).patience_seconds == 600.0


@pytest.mark.parametrize("claimed", [None, 3e9])
def test_an_emulated_speed_is_stated(claimed: float | None) -> None:
    said = _Stated("cpu", 1e9, claimed, 2e9, 1e6, 0.01)
    offer = _make_offer("a", said, _Listening("", (), True), 60.0, Surveyed("cpu", 8e9, None))
    assert offer.guessed == ()
    assert offer.limits.emulated_flops_per_second == 2e9
    assert offer.node.flops_per_second == (claimed or 2e9)
