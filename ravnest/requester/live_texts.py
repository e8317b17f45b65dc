"""What the model of a training writes: on request from any thread, and after every evaluation.

While a job is trained, texts come from its running clusters. After that the result writes them on this PC, if
it fits in memory. Nothing of it is counted in the books.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from functools import cached_property
from typing import Any, Protocol

import psutil  # type: ignore[import-untyped]

from ravnest.config import TIMEOUTS
from ravnest.errors import ConfigError, RavnestError
from ravnest.hub.coordinator.notices import Evaluated, Notice, SampledText
from ravnest.hub.service.generation_service import GenerationService, RowsToGoOn
from ravnest.protocol.generation import MOST_ROWS, TokenChoices
from ravnest.requester.generation import Sampling
from ravnest.requester.prepare import PreparedJob
from ravnest.requester.result import Result
from ravnest.requester.swarm_generation import NextWords, SwarmWriter, WholeModel, find_writer
from ravnest.requester.text_codec import TextStream, find_codec
from ravnest.units import show_bytes

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Hear = Callable[[int], object]
_SAMPLE_TOKENS = 48  # of a text after an evaluation


class Texts(Protocol):
    """Where texts come from."""

    def write(self, prompt: Prompt, sampling: Sampling, *, is_chat: bool, hear: Hear) -> Iterator[str]:
        """Yield what comes after a prompt, piece by piece; `hear` gets every token."""


class _Writing:
    """What a live and a finished training have in common: the model's writer."""

    def __init__(self, given: PreparedJob) -> None:
        self._given = given

    @cached_property
    def writer(self) -> SwarmWriter:
        """What writes with this job's model; it raises a sentence if that is no language model."""
        job = self._given.owner.job
        return find_writer(
            self._given.captured, job.model, lambda num_words: find_codec(job.tokenizer, job.model, num_words)
        )

    async def _stream(
        self, next_words: NextWords, ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[tuple[int, str], None]:
        """Yield each token with the piece of text that it completes; at the end, what is left."""
        stream, token = TextStream(self.writer.codec.decode), -1
        async for _, token in self.writer.write(next_words, [ids], sampling):
            yield token, stream.add(token)
        if piece := stream.end():
            yield -1, piece

    def encode(self, prompt: Prompt, *, is_chat: bool = False) -> list[int]:
        """Return the tokens of a prompt, or say what is wrong with it."""
        return self.writer.codec.encode_checked(prompt, self.writer.model.num_words, is_chat=is_chat)


class LiveTexts(_Writing):
    """Texts from the clusters of a training under way; made on the hub's event loop."""

    def __init__(
        self,
        given: PreparedJob,
        service: GenerationService,
        record: Callable[[tuple[SampledText, ...]], None],
        in_background: Callable[..., Any] = asyncio.to_thread,
    ) -> None:
        super().__init__(given)
        self._service, self._record, self._in_background = service, record, in_background
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()

    def write(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        is_chat: bool = False,
        hear: Hear = lambda _: None,
    ) -> Iterator[str]:
        """Yield what comes after a prompt, from any thread but the hub's own."""
        if threading.get_ident() == self._thread:
            raise ConfigError(
                "a callback runs where the hub works, which must not wait; read hub.generate(...) in a "
                "thread of its own, or give the Job sample_prompts=[...]"
            )
        pieces = self.stream(prompt, sampling, is_chat=is_chat)
        try:
            while (found := self._wait(_take(pieces))) is not None:
                token, piece = found
                if token >= 0:
                    hear(token)
                if piece:
                    yield piece
        finally:
            with contextlib.suppress(RavnestError):
                self._wait(_close(pieces))

    async def stream(
        self, prompt: Prompt, sampling: Sampling, *, is_chat: bool = False
    ) -> AsyncGenerator[tuple[int, str], None]:
        """Yield (token, text) on the hub's event loop; the last text may come without a token, as -1."""
        await self._in_background(lambda: self.writer)  # it may run the model once
        ids = self.encode(prompt, is_chat=is_chat)
        async with self._service.generating() as generation:

            async def ask(rows: RowsToGoOn) -> tuple[TokenChoices, ...]:
                return await self._service.ask(generation, rows)

            async for each in self._stream(ask, ids, sampling):
                yield each

    def check_prompts(self) -> None:
        """Refuse prompts of the job that its model cannot go on with."""
        for prompt in self._given.owner.job.sample_prompts:
            self.encode(prompt)

    def sample(self, news: Notice) -> None:
        """A callback: after an evaluation, let the model go on with the prompts of the job."""
        if isinstance(news, Evaluated) and self._given.owner.job.sample_prompts:
            task = self._loop.create_task(self._sample(news.epoch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _sample(self, epoch: int) -> None:
        prompts = self._given.owner.job.sample_prompts
        sampling, texts = Sampling(max_tokens=_SAMPLE_TOKENS), list[str]()
        try:
            async with self._service.generating() as generation, self._turn:
                await self._in_background(lambda: self.writer)
                ids = [self.encode(prompt) for prompt in prompts]
                for start in range(0, len(ids), MOST_ROWS):

                    async def ask(rows: RowsToGoOn) -> tuple[TokenChoices, ...]:
                        return await self._service.ask(generation, rows)

                    texts += await self.writer.write_text(ask, ids[start : start + MOST_ROWS], sampling)
                told = (SampledText(epoch, *pair) for pair in zip(prompts, texts, strict=True))
                self._record(tuple(told))
        except RavnestError as error:
            logger.warning("no texts after epoch %d: %s", epoch, error)

    def _wait(self, work: Any) -> Any:
        """Wait for work on the hub's event loop, as long as that goes on."""
        try:
            future: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise RavnestError("no text can be had: the training has ended") from None
        while True:
            try:
                return future.result(TIMEOUTS.program.text_look_seconds)
            except CancelledError:
                raise RavnestError("no text can be had: the training has ended") from None
            except NotYet:
                if self._loop.is_closed():
                    raise RavnestError("no text can be had: the training has ended") from None


class ResultTexts(_Writing):
    """Texts of the last result, written on this PC."""

    def __init__(self, given: PreparedJob, result: Result) -> None:
        super().__init__(given)
        self._result = result
        self._model: WholeModel | None = None

    def write(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        is_chat: bool = False,
        hear: Hear = lambda _: None,
    ) -> Iterator[str]:
        """Yield what comes after a prompt, piece by piece."""
        ids, model = self.encode(prompt, is_chat=is_chat), self._load()
        pieces = self._stream(model, ids, sampling)
        with asyncio.Runner() as runner:
            while (found := runner.run(_take(pieces))) is not None:
                token, piece = found
                if token >= 0:
                    hear(token)
                if piece:
                    yield piece

    def _load(self) -> WholeModel:
        """Load the weights, if they fit."""
        if self._model is None:
            blueprint = self._given.captured.blueprint
            size = sum(entry.size_bytes for entry in blueprint.state)
            free = psutil.virtual_memory().available
            if size > free:
                problem = (
                    f"the result takes {show_bytes(size)}, and {show_bytes(free)} of memory are free here"
                )
                raise ConfigError(f"{problem}; ask while it is trained, or on a PC with more memory")
            self._model = WholeModel(
                blueprint, {entry.name: self._result.state[entry.name] for entry in blueprint.state}
            )
        return self._model


async def _take(pieces: AsyncGenerator[tuple[int, str], None]) -> tuple[int, str] | None:
    return await anext(pieces, None)


async def _close(pieces: AsyncGenerator[tuple[int, str], None]) -> None:
    await pieces.aclose()
