"""Reports of peers about themselves, completed with the time of the link from them to the hub."""

from collections.abc import Callable

from ravnest.hub.coordinator.events import Probed
from ravnest.ids import NodeId
from ravnest.protocol.membership import ProbeReport
from ravnest.transfer.exchange import Exchange
from ravnest.transfer.link_probe import LinkTimes


class ProbeReports:
    """Completes one report of a peer for each probe that was ordered."""

    def __init__(self, exchange: Exchange, apply: Callable[[Probed], None]) -> None:
        self._exchange = exchange
        self._apply = apply
        self._awaited: set[NodeId] = set()

    def await_from(self, name: NodeId) -> None:
        """Expect a report: a probe was ordered."""
        self._awaited.add(name)

    def complete(self, name: NodeId, report: ProbeReport, clock: Callable[[], float]) -> None:
        """Time the link from a peer that has timed the link to it, then apply what was measured."""
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
            self._exchange.time_link(name, clock, say)
