"""News of who is lost and found, as people read them."""

import pytest

from ravnest.hub.coordinator.notice_texts import show_notice
from ravnest.hub.coordinator.notices import (
    ClusterBroken,
    ClusterDissolved,
    CutOff,
    EpochDone,
    FromCheckpoint,
    Leaving,
    Missing,
    Recovered,
    Resumed,
    WentWrong,
    WorkLost,
)
from ravnest.ids import HUB


@pytest.mark.parametrize(
    ("news", "sentence"),
    [
        (Resumed(40, 0), "the hub goes on: 40 samples are trained"),
        (Resumed(40, 3), "the hub goes on: 40 samples are trained; waiting for 3 peers to come back"),
        (Missing("ana", "link lost", 3.0), "ana is missing: link lost; it has 3 s to come back"),
        (
            CutOff(3, 600.0),
            "nothing is heard of all 3 peers: the line of this PC is probably down; nobody is given up "
            "for 10 min, and training goes on when they are back; others may join too",
        ),
        (Leaving("ana", "Ctrl-C"), "ana leaves: Ctrl-C; what it has is handed over"),
        (Recovered("A", 4.0, ()), "cluster A trains again after 4 s"),
        (
            Recovered("A", 4.0, ("ana", HUB)),
            "cluster A trains again after 4 s, with what ana and the last checkpoint had",
        ),
        (
            ClusterBroken("A", "ana: gone", 8),
            "cluster A stands still (ana: gone); 8 samples are trained again",
        ),
        (
            ClusterDissolved("A", "ana: gone", 8, 5),
            "cluster A ends (ana: gone); 8 samples given back, 5 lost",
        ),
        (FromCheckpoint(40), "training goes on from the checkpoint of 40 samples, with the nodes that join"),
        (WorkLost(7), "training goes back: nobody has what the last 7 samples taught"),
        (EpochDone(1, 50, 0, 0.5), "epoch 1: 50 samples, loss 0.5000"),
        (EpochDone(1, 50, 4, None), "epoch 1: 50 samples, 4 dropped, loss none"),
        (
            WentWrong("it leaps", "ana", goes_back=True),
            "training went wrong, ana was seen first: it leaps; it goes back to the last checkpoint",
        ),
        (
            WentWrong("it leaps", "ana", goes_back=False),
            "training went wrong, ana was seen first: it leaps; there is no checkpoint to go back to",
        ),
    ],
)
def test_each_is_one_sentence_that_says_what_it_means(news, sentence):
    assert show_notice(news) == sentence
