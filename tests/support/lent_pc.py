"""A lent PC without an agent: orders and reports pass its recorder by hand, and its page is served."""

import contextlib

from ravnest.config import TIMEOUTS
from ravnest.ids import HUB, MicrobatchId
from ravnest.model.blueprint.blueprint_json import write_blueprint
from ravnest.peer.compute_protocol import Build, StageBuilt
from ravnest.plan.types import Stage
from ravnest.protocol.placement import BlobRef, PlanOrder, StageParts
from ravnest.protocol.training import StepReport
from ravnest.provider.lending_documents import LendingFacts, LentTerms, MachineUse
from ravnest.provider.lending_page import describe_blueprint
from ravnest.provider.lending_recorder import LendingRecorder
from ravnest.provider.lending_site import LendingControl, LendingReplica, make_lending_site
from ravnest.transfer.outbox import Outgoing
from ravnest.web.pages import Pages
from ravnest.web.updates import GrowthCutter
from ravnest.web.web_server import WebServer, bind_address, make_gate
from tests.support.sample_blueprints import perceptron

DAY = "2026-11-17"
USE = MachineUse(2.6e9, 16e9, 3.2, 8, 0.55)
EVENING = 1_794_954_600.0  # seconds of the world, of a November day


def lent_terms(**changes):
    facts = {
        "name": "attic",
        "hub": "x2tphxea12345678",
        "addresses": ("tcp://203.0.113.7:7700",),
        "is_personal": True,
        "device": "cpu",
        "memory_bytes": 4e9,
        "flops_per_second": 2e10,
        "upload_bytes_per_second": 2.5e6,
        "cores": "4 of 8 cores, behind all other programs",
        "hours": ("22:00 to 07:00",),
        "on_battery": "stop",
    }
    return LentTerms(**{**facts, **changes})


def plan_order(pipeline=("ana", "attic", "cem"), build_id=3, stage=True):
    here = Stage("attic", 2, 5, window=4) if stage else None
    return PlanOrder(build_id, 1, 0, here, tuple(pipeline) if stage else (), (), ())


def build_item(order, blueprint=None):
    ref = BlobRef("0" * 64, 4)
    content = blueprint or b"{}\n" + write_blueprint(perceptron())
    return Build(order, StageParts(order.build_id, 0, ref, ()), content, (bytes(1000), bytes(24)))


def step_report(num_samples=8, idle_share=0.25, lag=2, build_id=3):
    return StepReport(build_id, MicrobatchId(1), 1, lag, num_samples, 0.01, 0.02, 0.0, idle_share, None, ())


class LentPc:
    """Its recorder, what its page shows, and what its page wanted."""

    def __init__(self, terms=None, now=0.0):
        self.recorder = LendingRecorder(terms or lent_terms(), now, EVENING)
        self.facts, self.now, self.wanted = LendingFacts(), now, []
        words = ("pause", "resume", "finish")
        wants = [lambda word=word: self.wanted.append(word) for word in words]
        self.control = LendingControl(lambda: self.facts, *wants)
        self.cutter = GrowthCutter()
        self.pages = Pages(LendingReplica(), self._ask, TIMEOUTS.program)

    def host(self, pipeline=("ana", "attic", "cem"), blueprint=None):
        """Join, get a stage and build it."""
        order = plan_order(pipeline)
        self.recorder.begin_part()
        self.recorder.connect()
        self.recorder.take_order(order)
        self.recorder.take_order(build_item(order, blueprint))
        self.recorder.take_answer(StageBuilt(order.build_id))
        found = self.recorder.blueprint
        self.recorder.describe_stage(found, describe_blueprint(found), "")

    def train(self, seconds=10, sent=50_000, received=80_000):
        """Let so many seconds pass, with one microbatch in each."""
        for _ in range(seconds):
            self.now += 1.0
            self.recorder.take_answer(Outgoing(HUB, step_report()))
            self.recorder.sent_bytes += sent
            self.recorder.received_bytes += received
            self.recorder.sample(USE, self.now, DAY)

    def document(self):
        return self.recorder.make_document(self.facts, self.now, DAY)

    def update(self):
        return self.cutter.cut(self.document(), self.recorder.news, self.recorder.curves)

    async def _ask(self, always):
        if always:
            self.pages.receive(self.update())
        return False


@contextlib.contextmanager
def serving_page(lent):
    """Serve the page of a lent PC; the gate and the server are given."""
    bound = bind_address("127.0.0.1:0")
    gate = make_gate(bound, "127.0.0.1:0")
    web = WebServer(bound, lambda: make_lending_site(gate, lent.pages, lent.control), TIMEOUTS.program)
    web.start()
    try:
        yield gate, web
    finally:
        web.close()
