"""Members in clusters that are made and changed by hand, and a hub.sourcing that finds state for them."""

from support.hub_world import blob, job
from support.plan_world import node

from ravnest.hub.coordinator.events import MakeParts, PartsMade, PeerJoined
from ravnest.hub.coordinator.membership import Membership
from ravnest.hub.coordinator.sources import StateSources
from ravnest.plan.assembly import form_rings
from ravnest.plan.types import Cluster, Plan, Stage
from ravnest.protocol.placement import SnapshotMade

HALVES = ((0, 3), (3, 6))


class HubScene:
    """All clusters are built at first; one is written as its nodes, and the intervals they host."""

    def __init__(self, names, *clusters, backups=()):
        self.members, self.sourcing, self.build_id, self.number = Membership(), StateSources(), 0, 0
        for name in names:
            self.members.join(PeerJoined(node(name), f"key of {name}", (), 0.0))
        for each in self.adopt(*clusters, backups=backups).built:
            for name in each.nodes:
                self.members.take_ready(name)

    def adopt(self, *clusters, backups=()):
        self.build_id = self.members.ask_for_plan().plan_id
        made = tuple(
            Cluster(tuple(Stage(name, *interval) for name, interval in zip(names, intervals, strict=True)))
            for names, intervals in clusters
        )
        rings = form_rings(made, {name: self.members.find(name).node for name in self.members})
        return self.members.adopt(Plan(self.build_id, 0, made, rings, (), backups), 1, job())

    def lose(self, name):
        self.members.leave(name).is_broken = True

    def change(self, *clusters, known=(), kept=-1):
        """Take another plan; who trains knows so much, by its root. Return where clusters go on from."""
        knowledge = dict(known)
        change = self.adopt(*clusters)
        return self.sourcing.begin(change, self.members, lambda each: knowledge.get(each.root, 0), kept)

    def count(self):
        self.number += 1
        return self.number

    def ask(self):
        """Who is asked for a snapshot, by the number of it."""
        sends = self.sourcing.ask(self.members, self.count)
        return {send.message.number: send.to for send in sends}

    def order(self):
        """What is ordered built, by node; parts are made as soon as they are asked for."""
        orders = self.sourcing.order(self.members)
        for each in [each for each in orders if isinstance(each, MakeParts)]:
            made = blob((each.start, each.stop)), blob(("weights", each.start, each.stop))
            self.members.take_parts(PartsMade(each.start, each.stop, *made, (), (), 0.0))
        orders += self.sourcing.order(self.members)
        return {order.to: order.message for order in orders if not isinstance(order, MakeParts)}

    def build(self):
        """Let all give what they are asked for, and order everything."""
        for number, name in self.ask().items():
            assert self.sourcing.take(name, SnapshotMade(1, number, 1, blob(name))) is None
        return {name: [each.node for each in parts.sources] for name, parts in self.order().items()}
