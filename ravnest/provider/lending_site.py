"""The site of a provider's page: what it answers, and the three things that a provider may want."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ravnest.provider.lending_documents import LendingDocument, LendingFacts
from ravnest.web.gate import Gate
from ravnest.web.pages import Pages
from ravnest.web.site import Site, SiteAnswers, say, to_response
from ravnest.web.updates import PageReplica


class PauseWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Take this PC back for a while."""


class ResumeWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lend it again."""


class FinishWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Take this PC back for good."""


LendingWish = PauseWish | ResumeWish | FinishWish
_WISHES: dict[str, type[LendingWish]] = {"pause": PauseWish, "resume": ResumeWish, "finish": FinishWish}


@dataclass(frozen=True, slots=True)
class LendingControl:
    """What the program that lends offers its page; any thread may call it."""

    facts: Callable[[], LendingFacts]
    pause: Callable[[], None]
    resume: Callable[[], None]
    finish: Callable[[], None]


@dataclass(frozen=True, slots=True)
class LendingOutcome:
    """What came of a wish."""

    outcome: str


class LendingReplica(PageReplica[LendingDocument]):
    """How a PC is lent, as the web's thread knows it."""

    def end(self) -> None:
        """Record that the program ends."""
        if self.run is not None:
            self.run = replace(self.run, is_live=False, can_pause=False, can_resume=False, can_finish=False)


def make_lending_site(gate: Gate, pages: Pages[LendingReplica], control: LendingControl) -> Site:
    """Return the site."""
    usual, answers = SiteAnswers(gate, pages, "ravnest.provider"), _LendingAnswers(pages, control)
    read = {"/api/v1/lending": answers.read_lending, "/api/v1/news": answers.read_news}
    acts = {f"/api/v1/{name}": usual.acting(kind, answers.carry_out) for name, kind in _WISHES.items()}
    return usual.make_site(
        [
            *(Route(path, usual.guarded(answer)) for path, answer in read.items()),
            *(Route(path, act, methods=["POST"]) for path, act in acts.items()),
        ]
    )


class _LendingAnswers:
    """One method for each path."""

    def __init__(self, pages: Pages[LendingReplica], control: LendingControl) -> None:
        self._pages, self._control = pages, control

    async def read_lending(self, _: Request) -> Response:
        """Answer how this PC is lent."""
        return to_response((await self._pages.fresh()).run)

    async def read_news(self, _: Request) -> Response:
        """Answer what the program said."""
        return to_response(list((await self._pages.fresh()).news))

    async def carry_out(self, wish: LendingWish) -> Response:
        """Do what the provider wants, or say why not."""
        run = (await self._pages.fresh()).run
        refusal = "the program is starting or ending; look again" if run is None else refuse_wish(wish, run)
        if refusal:
            return say(409, refusal)
        return to_response(LendingOutcome(await asyncio.to_thread(carry_out_wish, wish, self._control)), 202)


def refuse_wish(wish: LendingWish, lending: LendingDocument) -> str:
    """Return why a wish makes no sense now."""
    if not lending.can_finish:
        return "this PC is being taken back for good already"
    if isinstance(wish, PauseWish) and not lending.can_pause:
        return "it is paused already"
    if isinstance(wish, ResumeWish) and not lending.can_resume:
        return "it is not paused"
    return ""


def carry_out_wish(wish: LendingWish, control: LendingControl) -> str:
    """Do it; return what comes of it."""
    match wish:
        case PauseWish():
            control.pause()
            return "it hands over what it has and leaves; then it waits, with no tensors in memory"
        case ResumeWish():
            control.resume()
            return "it joins again under the same name, unless it is outside its hours or on battery"
        case FinishWish():
            control.finish()
            return "it hands over what it has and leaves; then the program ends, and this page with it"
