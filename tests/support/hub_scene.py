"""Members in clusters that are made and changed by hand, and sources that find state for them."""

from support.hub_world import blob, job
from support.plan_world import node

from ravnest.hub.coordinator.events import MakeParts, PartsMade, PeerJoined
from ravnest.hub.coordinator.membership import Membership
from ravnest.hub.coordinator.placement import Placement
from ravnest.hub.coordinator.snapshots import SnapshotDesk, SnapshotPurpose
from ravnest.hub.coordinator.sources import StateSources
from ravnest.plan.assembly import form_rings
from ravnest.plan.sharing import ALONE
from ravnest.plan.types import Cluster, Plan, Stage
from ravnest.protocol.placement import SnapshotMade

HALVES = ((0, 3), (3, 6))


class HubScene:
    """All clusters are built at first; one is written as its nodes, and the intervals they host."""

    def __init__(self, names, *clusters, backups=()):
        self.membership, self.desk, self.build_id = Membership(), SnapshotDesk(), 0
        self.placement = Placement(job(), self.membership)
        self.sources = StateSources(self.placement, self.desk)
        self.sharing = ALONE  # of plans to come
        for name in names:
            self.membership.join(PeerJoined(node(name), f"key of {name}", (), 0.0))
        change = self.adopt(*clusters, backups=backups)
        list(self.placement.announce(change, {}))
        self.build_all(change)

    def build_all(self, change):
        for each in change.built:
            for name in each.nodes:
                self.placement.mark_ready(name)

    def adopt(self, *clusters, backups=()):
        self.build_id = self.placement.ask_for_plan().plan_id
        made = tuple(
            Cluster(tuple(Stage(name, *interval) for name, interval in zip(names, intervals, strict=True)))
            for names, intervals in clusters
        )
        rings = form_rings(made, {name: self.membership.find(name).node for name in self.membership})
        return self.placement.adopt(Plan(self.build_id, 0, made, rings, (), backups), 1, self.sharing)

    def lose(self, name):
        self.membership.remove(name)
        self.placement.mark_broken(self.placement.cluster_of(name))

    def change(self, *clusters, known=(), kept=-1):
        """Take another plan; who trains knows so much, by its root. Return where clusters go on from."""
        knowledge = dict(known)
        change = self.adopt(*clusters)
        return self.sources.begin(change, lambda each: knowledge.get(each.root, 0), kept)

    def ask(self):
        """Who is asked for a snapshot, by the number of it."""
        sends = self.sources.ask()
        return {send.message.number: send.to for send in sends}

    def order(self):
        """What is ordered built, by node; parts are made as soon as they are asked for."""
        orders = self.sources.order_builds()
        for each in [each for each in orders if isinstance(each, MakeParts)]:
            made = blob((each.start, each.stop)), blob(("weights", each.start, each.stop))
            self.placement.add_parts(PartsMade(each.start, each.stop, *made, (), (), 0.0))
        orders += self.sources.order_builds()
        return {order.to: order.message for order in orders if not isinstance(order, MakeParts)}

    def answer(self, name, number):
        """Make a snapshot; return whether a source was asked for it."""
        made = SnapshotMade(1, number, 1, blob(name))
        if self.desk.answer(name, made) is not SnapshotPurpose.SOURCE:
            return False
        self.sources.add_snapshot(name, made)
        return True

    def build(self):
        """Let all give what they are asked for, and order everything."""
        for number, name in self.ask().items():
            self.answer(name, number)
        return {name: [each.node for each in parts.sources] for name, parts in self.order().items()}
