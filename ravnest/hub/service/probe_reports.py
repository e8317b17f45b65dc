"""Completes what peers report of themselves by timing the link from them to the hub."""

from collections.abc import Callable

from ravnest.hub.coordinator.events import Probed
from ravnest.ids import NodeId
from ravnest.protocol.membership import ProbeReport
from ravnest.transfer.blobs import Blobs, LinkTimes, Outgoing


class ProbeReports:
    """Completes what peers report of themselves by timing the way from them; one report per probe ordered."""

    def __init__(
        self, blobs: Blobs, post: Callable[[Outgoing], None], apply: Callable[[Probed], None]
    ) -> None:
        self._blobs = blobs
        self._post = post
        self._apply = apply
        self._awaited: set[NodeId] = set()

    def await_from(self, name: NodeId) -> None:
        """A probe is ordered."""
        self._awaited.add(name)

    def take(self, name: NodeId, report: ProbeReport, clock: Callable[[], float]) -> None:
        """Time the peer's link if it has done so, then say what was measured."""
        if name not in self._awaited:
            return
        self._awaited.remove(name)

        def say(link: LinkTimes | None) -> None:
            upload = link.bytes_per_second if link else None
            download, latency = report.download_bytes_per_second, report.latency_seconds
            self._apply(Probed(name, report.flops_per_second, upload, download, latency, clock()))

        if report.download_bytes_per_second is None:
            say(None)
        else:
            self._post(self._blobs.time(name, clock, say))
