"""Text from the live clusters of a hub: it sends the steps of generations, and waits for their answers.

Which cluster has a text is decided in coordinator.generation. The requester's side brings the fields of the
rows and chooses the tokens; only numbers pass through here.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.errors import RavnestError
from ravnest.hub.coordinator.generation import Generation, Generations, RowsAsked, StepAsked, Unanswered
from ravnest.hub.service.data_service import Fields
from ravnest.ids import NodeId
from ravnest.protocol.generation import (
    MOST_CHOICES,
    GenerationAnswer,
    GenerationFault,
    GenerationStep,
    TokenChoices,
)
from ravnest.protocol.messages import Refusal
from ravnest.transfer.outbox import Outgoing

logger = logging.getLogger(__name__)

MakeFields = Callable[[Sequence[str]], Fields]
_OVER = "the hub has ended, and its clusters with it"


@dataclass(frozen=True, slots=True)
class RowsToGoOn:
    """Rows of tokens with places of text in each, padded to `length`; `make_fields` gives them as fields."""

    asked: RowsAsked
    length: int
    make_fields: MakeFields
    num_choices: int = MOST_CHOICES


class GenerationService:
    """Asks clusters for the next tokens; it belongs to the hub's event loop."""

    def __init__(
        self,
        generations: Generations,
        post: Callable[[Outgoing], None],
        timeouts: HubTimeouts = TIMEOUTS.hub,
    ) -> None:
        self._generations, self._post, self._timeouts = generations, post, timeouts
        self._answers: dict[Generation, asyncio.Future[tuple[TokenChoices, ...] | Unanswered]] = {}
        self._changed = asyncio.Event()  # something may be running now that was not
        self._is_over = False
        self.num_open = 0  # generations under way
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.asynccontextmanager
    async def generating(self) -> AsyncIterator[Generation]:
        """Begin a generation, and end it."""
        self._check()
        found = self._generations.open()
        if isinstance(found, str):
            raise RavnestError(found)
        self.num_open += 1
        self._idle.clear()
        try:
            yield found
        finally:
            if (told := self._generations.close(found)) is not None and not self._is_over:
                nodes, message = told
                for node in nodes:
                    self._post(Outgoing(node, message))
            self.num_open -= 1
            if not self.num_open:
                self._idle.set()

    async def ask(self, generation: Generation, rows: RowsToGoOn) -> tuple[TokenChoices, ...]:
        """Return what a cluster says of the next token of each row; another one is asked if it breaks."""
        loop, seconds = asyncio.get_running_loop(), self._timeouts.generation_seconds
        patience = loop.time() + seconds
        while True:
            self._check()
            step = self._generations.ask(generation, rows.asked)
            if isinstance(step, Unanswered):
                await self._wait_for_cluster(step, patience)
                continue
            found = await self._await_answer(generation, step, rows)
            if not isinstance(found, Unanswered):
                return found
            logger.info("a text is gone on with elsewhere: %s", found.reason)
            patience = loop.time() + seconds

    async def _await_answer(
        self, generation: Generation, step: StepAsked, rows: RowsToGoOn
    ) -> tuple[TokenChoices, ...] | Unanswered:
        seconds = self._timeouts.generation_seconds
        answer: asyncio.Future[tuple[TokenChoices, ...] | Unanswered]
        answer = self._answers[generation] = asyncio.get_running_loop().create_future()
        try:
            self._send(step, rows)
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            return self._generations.expire(generation, seconds)
        finally:
            del self._answers[generation]

    def receive(self, sender: NodeId, message: GenerationAnswer | GenerationFault) -> None:
        """Take the word of a peer about a step."""
        generation = self._generations.find(message.generation)
        found = self._generations.receive(sender, message)
        if isinstance(found, Refusal):
            logger.debug("refused: %s", found.reason)
            return
        assert generation is not None
        self._resolve(generation, found)

    def follow(self) -> None:
        """Look at the clusters again: something has happened to the hub."""
        self._changed.set()
        for generation, found in self._generations.follow():
            self._resolve(generation, found)

    async def drain(self, seconds: float) -> None:
        """Wait until nobody waits for a text, but not for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()

    def close(self) -> None:
        """End everything that is under way."""
        self._is_over = True
        self._changed.set()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result(Unanswered(_OVER))

    def _check(self) -> None:
        if self._is_over:
            raise RavnestError(f"no text can be had: {_OVER}")

    async def _wait_for_cluster(self, found: Unanswered, patience: float) -> None:
        """Wait until a cluster may run; one that was just repaired goes on with the text."""
        told = f"no cluster can go on with the text: {found.reason}"
        if found.is_final:
            raise RavnestError(told)
        self._changed.clear()
        try:
            async with asyncio.timeout_at(patience):
                await self._changed.wait()
        except TimeoutError:
            raise RavnestError(f"{told}; try again when one is running") from None

    def _send(self, step: StepAsked, rows: RowsToGoOn) -> None:
        wanted = dict(step.fields)
        for node in step.nodes:
            specs, buffers = rows.make_fields(wanted.get(node, ()))
            message = GenerationStep(
                step.build_id,
                step.generation,
                step.step,
                rows.length,
                step.first,
                rows.asked.ends,
                rows.num_choices,
                specs,
            )
            self._post(Outgoing(node, message, buffers))

    def _resolve(self, generation: Generation, found: tuple[TokenChoices, ...] | Unanswered) -> None:
        answer = self._answers.get(generation)
        if answer is not None and not answer.done():
            answer.set_result(found)
