"""A dashboard that shows a scripted hub, for tests that open it in a browser or ask it over HTTP."""

import contextlib

from support.hub_world import job
from support.watched_world import AT_WORK, WatchedWorld

from ravnest.config import TIMEOUTS
from ravnest.hub.service.guests import GuestsInMemory
from ravnest.hub.service.web.actions import GuestActions, HubActions
from ravnest.hub.service.web.snapshot import RunReplica, UpdateCutter
from ravnest.hub.service.web.web_app import WebParts, make_run_site
from ravnest.hub.service.web.what_if import pose_what_if
from ravnest.net.identity import INVITATION_BYTES
from ravnest.web.pages import Pages
from ravnest.web.web_server import WebServer, bind_address, make_gate

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "<script>alert(2)</script>",
    "javascript:alert(3)",
    '"><svg onload=alert(4)>',
)


class Served:
    """A web server that shows a scripted world; it is asked only while the test lets the world rest."""

    def __init__(self, world: WatchedWorld) -> None:
        self.world, self.cutter = world, UpdateCutter(world.recorder)
        bound = bind_address("127.0.0.1:0")
        self.gate = make_gate(bound, "127.0.0.1:0")
        self.pages = Pages(RunReplica(), self._ask, TIMEOUTS.program)
        self.guests, self.kicked, self.asked = GuestsInMemory(), [], []
        guests = GuestActions(lambda: "rvn1_everybody", self._invite, self._revoke, self.guests.read)
        hub = HubActions(
            lambda _: None,
            lambda *facts: self.kicked.append(facts),
            lambda: self.asked.append("checkpoint"),
            guests,
        )
        parts = WebParts(self.gate, self.pages, hub, pose=self._pose)
        self.web = WebServer(bound, lambda: make_run_site(parts), TIMEOUTS.program)

    async def _pose(self, guest):
        return pose_what_if(self.world.recorder, guest)

    def _invite(self, name, days, nodes):
        number = name.encode().hex().ljust(2 * INVITATION_BYTES, "0")
        self.guests.change(lambda known: known.invite(number, name, 1e9, days and 86_400 * days, nodes))
        return f"rvn1_{name}"

    def _revoke(self, name):
        self.guests.change(lambda known: known.revoke(name))

    async def _ask(self, always: bool) -> bool:
        if always:
            self.pages.receive(self.cutter.cut(AT_WORK))
        return False

    def show(self) -> None:
        """Send what is new."""
        self.web.call(lambda pages: pages.receive(self.cutter.cut(AT_WORK)))


@contextlib.contextmanager
def serving(world):
    served = Served(world)
    served.web.start()
    try:
        yield served
    finally:
        served.web.close()


def trained_world(names, **changes):
    world = WatchedWorld(job(epochs=6, **changes))
    world.join(*names, memory_mb=250.0)
    world.run_until(lambda: world.hub.clusters and world.hub.ledger.num_counted > 0)
    return world
