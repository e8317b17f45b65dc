"""Records as rows of tokens: which are learned, how long rows are, and what is lost.

A token counts in the loss if it is learned: all of a text, a completion, or what the assistant says. Labels
are one place ahead of the tokens; -100 is not learned. Rows are padded at their end, where causal attention
does not look, or packed: several in one row, told apart by their positions. No torch in here.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ravnest.errors import ConfigError
from ravnest.requester.finetuning.records import ChatRecord, PromptRecord, Record, TextRecord
from ravnest.units import show_count

Integers = NDArray[np.int64]
_Ids = NDArray[np.int32]
_Span = tuple[int, int]
NOT_LEARNED = -100  # what torch's cross entropy leaves out


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    eos_token_id: int | None
    pad_token_id: int | None
    chat_template: Any

    def __call__(self, text: str, *, add_special_tokens: bool = ..., verbose: bool = ...) -> Any:
        """Return a mapping with `input_ids`."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Return a chat as text."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenRow:
    """Tokens in a row, and which of them are learned; the first one has nothing that it follows from."""

    ids: _Ids
    is_learned: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def has_lesson(self) -> bool:
        """Whether anything is learned from it."""
        return bool(self.is_learned[1:].any())


@dataclass
class RecordEncoder:
    """Turns records into rows of at most `max_length` tokens; counts what it cuts or leaves out."""

    tokenizer: Tokenizer
    max_length: int
    num_cut: int = 0
    num_left_out: int = 0
    num_partly: int = 0

    def encode(self, records: Iterable[Record]) -> Iterator[TokenRow]:
        """Yield the rows; of a long text there are several, everything else is cut."""
        for record in records:
            rows = [row for row in self._encode(record) if row.has_lesson]
            self.num_left_out += not rows
            yield from rows

    def describe(self) -> tuple[str, ...]:
        """Return what was cut or left out, one sentence each."""
        found = []
        if self.num_cut:
            count = show_count(self.num_cut, "record")
            found.append(f"{count} longer than {self.max_length} tokens: the rest is cut (max_length)")
        if self.num_left_out:
            found.append(f"{show_count(self.num_left_out, 'record')} left out: nothing in it can be learned")
        if self.num_partly:
            count = show_count(self.num_partly, "chat")
            found.append(f"{count} of which only the last answers are learned: the template rewrites others")
        return tuple(found)

    def _encode(self, record: Record) -> list[TokenRow]:
        match record:
            case TextRecord(text=text):
                ids = self._end(self._tokenize(text)) if text.strip() else []
                parts = [ids[n : n + self.max_length] for n in range(0, len(ids), self.max_length)]
                return [_make_row(part, [(0, len(part))]) for part in parts]
            case PromptRecord():
                ids = self._end(self._tokenize(record.prompt + record.completion))
                first = _count_same(self._tokenize(record.prompt), ids)
                return [self._cut(ids, [(first, len(ids))])]
            case ChatRecord():
                return [self._cut(*self._encode_chat(record))]

    def _encode_chat(self, chat: ChatRecord) -> tuple[list[int], list[_Span]]:
        """Return the tokens of a chat and where the assistant speaks in them.

        The template is asked for the chat up to each answer: what follows there is the answer.
        """
        whole = self._render(chat, len(chat.messages))
        ids = self._tokenize(whole, is_rendered=True)
        spans = []
        answers = [n for n, message in enumerate(chat.messages) if message.role == "assistant"]
        for number in answers:
            before = self._render(chat, number, is_asking=True) if number else ""
            after = self._render(chat, number + 1)
            if whole.startswith(before) and whole.startswith(after) and after.startswith(before):
                ends = [self._tokenize(text, is_rendered=True) if text else [] for text in (before, after)]
                start, stop = (_count_same(end, ids) for end in ends)
                spans.append((start, len(ids) if after == whole else stop))
        if not spans:
            told = "the model's chat template renders the chat up to an answer in another way than all of it"
            raise ConfigError(f"{chat.place}: {told}; give prompt and completion as text instead")
        self.num_partly += len(spans) < len(answers)
        return ids, spans

    def _render(self, chat: ChatRecord, stop: int, *, is_asking: bool = False) -> str:
        if not self.tokenizer.chat_template:
            told = f"{chat.place} is a chat, but the model's tokenizer has no chat template"
            raise ConfigError(f"{told}; give prompt and completion, or an instruct version of the model")
        given = [{"role": each.role, "content": each.content} for each in chat.messages[:stop]]
        try:
            text = self.tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=is_asking)
        except Exception as error:  # whatever a template raises: roles in a wrong order, no system message
            told = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"{chat.place}: the model's chat template refuses it: {told}") from None
        return str(text)

    def _tokenize(self, text: str, *, is_rendered: bool = False) -> list[int]:
        found = self.tokenizer(text, add_special_tokens=not is_rendered, verbose=False)["input_ids"]
        return list(found)

    def _end(self, ids: list[int]) -> list[int]:
        """Return tokens that end where the text does, so that a model learns to end, too."""
        end = self.tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    def _cut(self, ids: Sequence[int], spans: Sequence[_Span]) -> TokenRow:
        self.num_cut += len(ids) > self.max_length
        return _make_row(ids[: self.max_length], spans)


def _make_row(ids: Sequence[int], learned: Sequence[_Span]) -> TokenRow:
    is_learned = np.zeros(len(ids), np.bool_)
    for start, stop in learned:
        is_learned[start:stop] = True
    return TokenRow(np.array(ids, np.int32), is_learned)


def _count_same(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens are alike at the beginning: a token across a border belongs to what follows."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Rows of one length; `positions` if they are packed. `num_learned` tokens count in the loss."""

    input_ids: Integers
    labels: Integers
    positions: Integers | None
    num_tokens: int  # without padding

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def length(self) -> int:
        """Tokens in a row."""
        return int(self.input_ids.shape[1])

    @property
    def num_learned(self) -> int:
        """Tokens that count in the loss."""
        return int((self.labels != NOT_LEARNED).sum())

    @property
    def padding_share(self) -> float:
        """How much of what is computed is padding."""
        return 1.0 - self.num_tokens / self.input_ids.size

    @property
    def fields(self) -> Mapping[str, NDArray[Any]]:
        """The columns of a batch; `loss_scale` turns a mean over rows of sums into one over tokens."""
        scale = np.full(len(self), len(self) / max(self.num_learned, 1), np.float32)
        found: dict[str, NDArray[Any]] = {"input_ids": self.input_ids, "labels": self.labels}
        if self.positions is not None:
            found["position_ids"] = self.positions
        return {**found, "loss_scale": scale}


def pad_rows(rows: Sequence[TokenRow], pad_id: int, length: int) -> TokenTable:
    """Return one row for each."""
    return _fill([[row] for row in rows], pad_id, length, is_packed=False)


def pack_rows(rows: Sequence[TokenRow], pad_id: int, length: int) -> TokenTable:
    """Return as few rows as a simple rule finds: the longest first, each where it leaves least room."""
    bins: list[list[TokenRow]] = []
    free: list[tuple[int, int]] = []  # room and number of a bin, the fullest first
    for row in sorted(rows, key=lambda row: -len(row)):
        place = bisect_left(free, (len(row), -1))
        room, number = free.pop(place) if place < len(free) else (length, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append(row)
        insort(free, (room - len(row), number))
    return _fill(bins, pad_id, length, is_packed=True)


def _fill(groups: Sequence[Sequence[TokenRow]], pad_id: int, length: int, *, is_packed: bool) -> TokenTable:
    shape = (len(groups), length)
    input_ids, labels = np.full(shape, pad_id, np.int64), np.full(shape, NOT_LEARNED, np.int64)
    positions = np.zeros(shape, np.int64)
    num_tokens = 0
    for number, group in enumerate(groups):
        start = 0
        for row in group:
            stop = start + len(row)
            input_ids[number, start:stop] = row.ids
            labels[number, start : stop - 1] = np.where(row.is_learned[1:], row.ids[1:], NOT_LEARNED)
            positions[number, start:stop] = np.arange(stop - start)
            start = stop
        num_tokens += start
        positions[number, start:] = np.arange(length - start)
    return TokenTable(input_ids, labels, positions if is_packed else None, num_tokens)


def split_rows(
    rows: Sequence[TokenRow], share: float, generator: np.random.Generator
) -> tuple[list[TokenRow], list[TokenRow]]:
    """Return the rows to train on and those to validate with, drawn by chance."""
    num_validation = round(share * len(rows))
    if share > 0 and len(rows) >= 2:
        num_validation = min(max(num_validation, 1), len(rows) - 1)
    chosen = set(generator.permutation(len(rows))[:num_validation].tolist())
    train = [row for number, row in enumerate(rows) if number not in chosen]
    return train, [rows[number] for number in sorted(chosen)]
