"""What the ledger remembers of leases that are counted: enough for late words, and no more."""

from support.hub_scene import HubScene
from support.hub_world import blob, job

from ravnest.hub.coordinator.events import PartsMade
from ravnest.hub.coordinator.ledger import Ledger
from ravnest.protocol.training import LeaseDone

NUM_LEASES = 12_000


def test_an_epoch_of_many_leases_costs_no_memory_for_each_of_them():
    scene = HubScene("a", ("a", ((0, 6),)))
    scene.placement.find_parts(0, 6)
    scene.placement.add_parts(PartsMade(0, 6, blob("a"), None, ("x",), ("x",), 0.0))
    given = job(num_samples=NUM_LEASES * 4, num_validation=0, chunk_batches=1, epochs=1)
    ledger, (cluster,) = Ledger(given.settings), scene.placement.clusters
    ledger.fill(scene.placement)
    for _ in range(NUM_LEASES - 1):
        last = ledger.open_leases[0]
        assert ledger.record_done(cluster, LeaseDone(cluster.build_id, last.number, 4)) == []
        ledger.fill(scene.placement)
    assert ledger.num_counted == 4 * (NUM_LEASES - 1)
    assert ledger.find_training(last.first_microbatch) is last, "somebody may still speak of it"
    assert ledger.find_awaited(ledger.open_leases[0].first_microbatch) is ledger.open_leases[0]
    assert ledger.find_training(0) is None
    assert len(ledger.awaited_leases) <= 10_000
