"""The run as the web's thread knows it. The recorder stays with the hub, which cuts off what is new. Pure."""

from dataclasses import replace

from ravnest.hub.service.web.documents import RunDocument, UpdateDocument
from ravnest.hub.service.web.recorder import RunRecorder
from ravnest.hub.service.web.snapshot import HubFacts, make_document
from ravnest.web.updates import GrowthCutter, PageReplica


class UpdateCutter:
    """Cuts off what a recorder has that was not cut off before."""

    def __init__(self, recorder: RunRecorder) -> None:
        self.recorder = recorder
        self._growth = GrowthCutter()

    def cut(self, facts: HubFacts) -> UpdateDocument:
        """Return where the run stands, and what is new."""
        run = make_document(self.recorder, facts)
        return self._growth.cut(run, self.recorder.news, self.recorder.curves)


class RunReplica(PageReplica[RunDocument]):
    """Put all updates of a run into it, in order."""

    def end(self) -> None:
        """Record that the hub is no longer at work."""
        if self.run is not None:
            self.run = replace(self.run, is_live=False, can_stop=False, can_invite=False)
