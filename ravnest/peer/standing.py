"""How far a stage is from the last average, and who waits to hear of that average from it.

A member that missed rounds, or was just built, asks the owner before it in each ring. Whoever is asked may
have to ask another first, or may not have heard of the asker's plan yet. Driven by peer.averager.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ravnest.codec import describe, encode
from ravnest.config import WireFormat
from ravnest.exchange import Parcel
from ravnest.peer.anchored import Anchored
from ravnest.plan.types import NodeId
from ravnest.protocol import AnchorPart, AnchorQuery, RoundId, SegmentId

_MOST_ASKED = 4096


@dataclass(frozen=True, slots=True)
class Standing:
    """The round whose average the anchors are, these and outer momenta by name, samples trained since.

    Without a base the anchors are nobody's, and others must be asked for.
    """

    base: RoundId | None
    anchors: Mapping[str, Tensor] = field(default_factory=dict)
    outer: Mapping[str, Tensor] = field(default_factory=dict)
    num_samples: int = 0


class Askers:
    """Who waits for the anchor of which segment, of this plan or of newer ones."""

    def __init__(self) -> None:
        self._queries: dict[tuple[NodeId, SegmentId], AnchorQuery] = {}

    def add(self, sender: NodeId, query: AnchorQuery) -> None:
        """Remember a query; one who asks for more than any stage has is not heard."""
        if len(self._queries) < _MOST_ASKED:
            self._queries[sender, query.segment] = query

    def take(self) -> list[tuple[NodeId, AnchorQuery]]:
        """Return all, and forget them."""
        queries, self._queries = self._queries, {}
        return [(sender, query) for (sender, _), query in queries.items()]

    def answer(self, plan: int, base: RoundId | None, segments: Mapping[SegmentId, Anchored]) -> list[Parcel]:
        """Send the anchors of `base` to who waits for them; who wants older ones will ask anew."""
        parcels: list[Parcel] = []
        for (sender, segment), query in [*self._queries.items()]:
            if query.plan != plan or base is None or query.base > base:
                continue
            del self._queries[sender, segment]
            for offset, items in segments[segment].pieces() if query.base == base else ():
                part = AnchorPart(plan, segment, base, offset, describe(items, WireFormat.FP32))
                parcels.append(Parcel(sender, part, (encode(items, WireFormat.FP32),)))
        return parcels
