"""Backups: when snapshots are asked for, and who keeps them."""

import pytest
from support.hub_scene import HALVES, HubScene
from support.hub_world import blob

from ravnest.hub.coordinator.snapshots import BackupPolicy, SnapshotPurpose
from ravnest.ids import HUB
from ravnest.plan.types import Backup
from ravnest.protocol.placement import BackupKept, SnapshotMade

CLUSTERS = ("ab", HALVES), ("cd", HALVES)


class Spares:
    """Two clusters; s keeps backups of a, and t of d."""

    def __init__(self):
        backups = Backup("s", "a"), Backup("t", "d")
        self.scene = HubScene("abcdst", *CLUSTERS, backups=backups)
        self.backing = BackupPolicy(self.scene.placement, self.scene.desk, self.scene.sources.add_backup)
        self.known = {"a": 70, "c": 90}

    def order(self, now):
        """Who is asked, by the number of the snapshot."""
        sends = self.backing.order(lambda cluster: self.known[cluster.root], now)
        assert not any(send.message.is_final for send in sends), "training goes on"
        return {send.message.number: send.to for send in sends}

    def make(self, number, name):
        """Who is to fetch the snapshot of a node, and from whom."""
        made = SnapshotMade(1, number, 5, blob(name, number))
        if self.scene.desk.answer(name, made) is not SnapshotPurpose.BACKUP:
            return None
        sends = self.backing.forward(name, made)
        return [(send.to, send.message.number, send.message.source.node) for send in sends]

    def keep(self, number, spare, now):
        return self.backing.record(spare, BackupKept(0, number), now)


@pytest.fixture
def spares():
    """Training began at 100 s."""
    spares = Spares()
    assert spares.order(100.0) == {}
    return spares


def test_snapshots_come_every_half_minute_the_first_ones_too(spares):
    assert spares.backing.due == 130.0
    assert spares.order(129.9) == {}
    assert spares.order(130.0) == {1: "a", 2: "d"}
    assert spares.order(130.1) == {}
    assert spares.backing.due == 160.0
    assert spares.order(160.0) == {3: "a", 4: "d"}


def test_without_backups_nobody_is_asked_and_a_spare_that_comes_later_gets_its_own_at_once(spares):
    spares.scene.adopt(*CLUSTERS)
    assert spares.backing.due is None
    assert spares.order(200.0) == spares.order(210.0) == {}
    spares.scene.adopt(*CLUSTERS, backups=(Backup("s", "a"),))
    assert spares.backing.due == 130.0, "which is over"
    assert spares.order(211.0) == {1: "a"}
    assert spares.backing.due == 241.0


def test_while_the_cluster_is_built_nobody_is_asked_and_nothing_is_due(spares):
    cluster, _ = spares.scene.placement.clusters
    spares.scene.lose("d")
    spares.scene.placement.mark_broken(cluster)
    assert spares.backing.due is None
    assert spares.order(130.0) == {}
    change = spares.scene.adopt(("ab", HALVES), backups=(Backup("s", "a"),))
    assert spares.order(131.0) == {}
    spares.scene.build_all(change)
    assert spares.order(140.0) == {1: "a"}


def test_between_two_that_are_slow_lies_ten_times_what_they_take(spares):
    spares.order(130.0)
    spares.make(1, "a")
    spares.make(2, "d")
    assert spares.keep(2, "t", 132.0) is None
    assert spares.backing.due == 160.0, "two seconds are not slow"
    assert spares.keep(1, "s", 135.0) is None
    assert spares.backing.due == 185.0
    assert spares.order(184.9) == {}
    assert spares.order(185.0) == {3: "a", 4: "d"}


def test_only_of_clusters_that_train_and_for_spares_that_are_here(spares):
    spares.scene.placement.mark_broken(spares.scene.placement.clusters[0])
    assert spares.order(130.0) == {1: "d"}
    spares.scene.membership.remove("t")
    assert spares.order(160.0) == {}


def test_a_spare_fetches_what_was_asked_for_once(spares):
    spares.order(130.0)
    assert spares.make(3, "a") is None
    assert spares.make(1, "d") is None, "number 1 was asked of another"
    assert spares.make(1, "a") == [("s", 1, "a")]
    assert spares.make(1, "a") is None


def test_what_a_spare_was_not_to_keep_is_refused(spares):
    spares.order(130.0)
    assert spares.keep(1, "s", 131.0) == "nobody asked s to keep snapshot 1", "it was not made yet"
    spares.make(1, "a")
    assert spares.keep(1, "t", 131.0) == "nobody asked t to keep snapshot 1"
    assert spares.keep(1, "s", 131.0) is None
    assert spares.keep(1, "s", 131.0) is not None


def test_what_does_not_arrive_is_asked_for_again_and_then_comes_too_late(spares):
    spares.order(130.0)
    assert spares.order(160.0) == {3: "a", 4: "d"}
    assert spares.make(1, "a") is None


@pytest.mark.parametrize(("kept", "giver"), [(77, "s"), (78, HUB)])
def test_a_backup_counts_by_what_its_cluster_knew_when_it_was_asked_for(spares, kept, giver):
    spares.order(130.0)
    spares.known["a"] = 1000
    spares.make(1, "a")
    spares.keep(1, "s", 131.0)
    scene = spares.scene
    scene.lose("a")
    scene.lose("c")
    scene.change(("tb", HALVES), kept=kept)
    assert scene.build() == {"t": [giver], "b": []}
