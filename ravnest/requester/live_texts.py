"""What the model of a training writes: on request from any thread, and after every evaluation.

While a job is trained, texts come from its running clusters. After that the result writes them on this PC, if
it fits in memory. Nothing of it is counted in the books. Tokens are chosen here: the leaf names the likeliest
words, and a seeded generator draws among them, so the same request gives the same text whichever cluster
answers. A text longer than the rows of the job is seen by its last tokens.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from ravnest.codec import decode_tensor, describe, encode_tensor, narrow_integers, widen_integers
from ravnest.config import TIMEOUTS, FrozenFormat, WireFormat
from ravnest.errors import ConfigError, RavnestError
from ravnest.hub.coordinator.generation import RowsAsked
from ravnest.hub.coordinator.notices import Evaluated, Notice, SampledText
from ravnest.hub.service.data_service import Fields
from ravnest.hub.service.generation_service import GenerationService, RowsToGoOn
from ravnest.model.blueprint.program import Blueprint
from ravnest.model.capture.capture import Captured
from ravnest.model.stage.stage_program import build_stage_program
from ravnest.model.stage.stage_texts import write_for_new_places
from ravnest.model.stage.text_model import (
    LOGITS_RESULT,
    ONES_FIELDS,
    PLACES_FIELDS,
    TextModel,
    find_text_model,
)
from ravnest.peer.stage_generation import choose_words
from ravnest.protocol.generation import MOST_ROWS, TokenChoices
from ravnest.requester.generation import Sampling
from ravnest.requester.prepare import PreparedJob
from ravnest.requester.result import Result
from ravnest.requester.text_codec import TextCodec, TextStream, find_codec
from ravnest.units import show_bytes

_MOST_CHECKED = 3e8  # parameters: one row of more takes a slow PC long
_CAUSAL = ("ForCausalLM", "LMHeadModel", "LMHead")
_DIFFERENCE = 1e-3  # of logits that should be the same


class NextWords(Protocol):
    """Whoever says which words come next."""

    async def __call__(self, rows: RowsToGoOn) -> tuple[TokenChoices, ...]:
        """Return the likeliest words of each row."""


@dataclass(frozen=True, eq=False)
class SwarmWriter:
    """Goes on with texts by the model of a job."""

    model: TextModel
    codec: TextCodec

    async def write(
        self, next_words: NextWords, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> AsyncIterator[tuple[int, int]]:
        """Yield (row, token), token by token, up to an end of each row, which is not among them."""
        assert 1 <= len(prompts) <= MOST_ROWS
        rows = [_Row(list(prompt), torch.Generator().manual_seed(sampling.seed)) for prompt in prompts]
        first = 0
        for _ in range(sampling.max_tokens):
            answer = await next_words(self.make_rows([row.tokens for row in rows], first))
            first = self.model.length
            for number, (row, choices) in enumerate(zip(rows, answer, strict=True)):
                if row.is_done:
                    continue
                token = choices.words[sampling.choose(torch.tensor(choices.logits), row.generator)]
                if token in self.codec.ends:
                    row.is_done = True
                    continue
                # One that is too long moves on in its row: every place has another token then.
                first = min(first, len(row.tokens) if len(row.tokens) < self.model.length else 0)
                row.tokens.append(token)
                yield number, token
            if all(row.is_done for row in rows):
                return

    async def write_text(
        self, next_words: NextWords, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[str]:
        """Return what is written after each prompt."""
        streams = [TextStream(self.codec.decode) for _ in prompts]
        async for row, token in self.write(next_words, prompts, sampling):
            streams[row].add(token)
        return [stream.text for stream in streams]

    def make_rows(self, rows: Sequence[Sequence[int]], first: int) -> RowsToGoOn:
        """Return rows of tokens as stages take them: the last ones that fit, padded on the right."""
        length = self.model.length
        shown = [row[-length:] for row in rows]
        tokens = torch.zeros(len(rows), length, dtype=torch.int64)
        for number, row in enumerate(shown):
            tokens[number, : len(row)] = torch.tensor(row)
        asked = RowsAsked(tuple(map(len, shown)), first, self.model.num_words)
        return RowsToGoOn(asked, length, lambda names: self._make_fields(tokens, names))

    def _make_fields(self, tokens: Tensor, names: Sequence[str]) -> Fields:
        fields = {
            name: narrow_integers(field)
            for name, field in fill_fields(self.model, tokens).items()
            if name in names
        }
        specs = tuple((name, describe(field, WireFormat.FP32)) for name, field in fields.items())
        return specs, tuple(encode_tensor(field, WireFormat.FP32) for field in fields.values())


@dataclass(slots=True)
class _Row:
    tokens: list[int]
    generator: torch.Generator
    is_done: bool = field(default=False)


def fill_fields(model: TextModel, tokens: Tensor) -> dict[str, Tensor]:
    """Return all fields that a model takes beside its tokens: masks of ones, places, kinds of zero."""
    fields = {}
    for name, dtype in model.dtypes:
        if name == model.token_field:
            fields[name] = tokens.to(getattr(torch, dtype))
        elif name in ONES_FIELDS:
            fields[name] = torch.ones(tokens.shape, dtype=getattr(torch, dtype))
        elif name in PLACES_FIELDS:
            places = torch.arange(tokens.shape[1]).expand(tokens.shape)
            fields[name] = places.to(getattr(torch, dtype)).contiguous()
        else:
            fields[name] = torch.zeros(tokens.shape, dtype=getattr(torch, dtype))
    return fields


class WholeModel:
    """A captured model with all its weights in this PC's memory: it answers as a cluster does."""

    def __init__(self, blueprint: Blueprint, state: Mapping[str, Tensor]) -> None:
        exact = tuple(replace(entry, storage=FrozenFormat.FP32) for entry in blueprint.state)
        self._blueprint = replace(blueprint, state=exact)
        self._program = build_stage_program(self._blueprint)
        self._state = state

    def run(self, fields: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of rows."""
        written = {x.name: self._state[x.name].clone() for x in self._blueprint.state if x.is_written}
        with torch.no_grad():
            return self._program.forward_text({**self._state, **written}, {}, fields).results[LOGITS_RESULT]

    async def __call__(self, rows: RowsToGoOn) -> tuple[TokenChoices, ...]:
        """See NextWords."""
        return await asyncio.to_thread(self._answer, rows)

    def _answer(self, rows: RowsToGoOn) -> tuple[TokenChoices, ...]:
        program = self._blueprint.evaluate
        dtypes = {name: program.values[value].dtype for value, name in program.fields}
        specs, buffers = rows.make_fields(tuple(dtypes))
        fields = {
            name: widen_integers(decode_tensor(buffer, spec), dtypes[name])
            for (name, spec), buffer in zip(specs, buffers, strict=True)
        }
        found = choose_words(self.run(fields), rows.asked.ends, rows.num_choices)
        if isinstance(found, str):
            raise RavnestError(f"no text can be had: {found}")
        return found


def find_writer(captured: Captured, job_model: object, make_codec: Callable[[int], TextCodec]) -> SwarmWriter:
    """Return what writes texts with a captured model, or raise the sentence that says why it cannot."""
    found = find_text_model(captured.blueprint)
    if isinstance(found, str):
        raise ConfigError(f"this job writes no text: {found}")
    if not _is_causal(captured, found, type(job_model).__name__):
        raise ConfigError(
            "this job writes no text: its model looks at what comes after a token, so it does not say which "
            "one is next; a model that writes sees only what came before (is_causal=True)"
        )
    program = write_for_new_places(captured.blueprint, found.length)
    if isinstance(program, str):
        logger.info("texts of this model take whole rows for each token: %s", program)
    return SwarmWriter(found, make_codec(found.num_words))


def _is_causal(captured: Captured, model: TextModel, name: str) -> bool:
    """Return whether what a model says of a place depends on that place and those before alone."""
    if "MaskedLM" in name or name.endswith(_CAUSAL):
        return "MaskedLM" not in name
    tensors = captured.state.values()
    is_stored = any(entry.storage is not FrozenFormat.FP32 for entry in captured.blueprint.state)
    is_large = sum(each.numel() for each in tensors) > _MOST_CHECKED
    if is_stored or is_large or any(each.is_meta for each in tensors):
        logger.warning("note: it is not checked that the model looks only at what came before a token")
        return True
    half = max(1, model.length // 2)
    tokens = torch.randint(model.num_words, (1, model.length), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[:, half:] = (other[:, half:] + 1) % model.num_words
    whole = WholeModel(captured.blueprint, {k: v.detach().cpu() for k, v in captured.state.items()})
    one, two = whole.run(fill_fields(model, torch.cat([tokens, other])))[:, :half].float()
    difference = float((one - two).abs().max())
    return model.length == 1 or difference <= _DIFFERENCE * (1 + float(one.abs().max()))


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
