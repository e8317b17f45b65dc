"""Tokens: what is learned is masked right, rows are padded, packed and split, and losses are counted."""

import numpy as np
import pytest

from ravnest.errors import ConfigError
from ravnest.requester.finetuning.records import ChatMessage, ChatRecord, PromptRecord, TextRecord
from ravnest.requester.finetuning.tokens import (
    NOT_LEARNED,
    RecordEncoder,
    pack_rows,
    pad_rows,
    split_rows,
)

START, END = 1, 2


class Letters:
    """A tokenizer of letters; "ab" is one token, and a text begins with a mark."""

    eos_token_id, pad_token_id = END, 0
    chat_template = "yes"

    def __init__(self, rewrites=False):
        self._rewrites = rewrites

    def __call__(self, text, *, add_special_tokens=True, verbose=True):
        text = text.replace("ab", "\x90").replace("#", chr(END))
        return {"input_ids": [START] * add_special_tokens + [ord(letter) for letter in text]}

    def apply_chat_template(self, conversation, tokenize, add_generation_prompt):
        if conversation[0]["role"] == "assistant":
            raise ValueError("a user begins\nsecond line")
        parts = [f"{each['role'][0]}:{each['content']}#" for each in conversation]
        if self._rewrites:  # only the last answer keeps what was thought
            parts = [part.replace("~", "") if n < len(parts) - 1 else part for n, part in enumerate(parts)]
        return "".join(parts) + "a:" * add_generation_prompt


def encode(*records, max_length=64, tokenizer=None):
    encoder = RecordEncoder(tokenizer or Letters(), max_length)
    return list(encoder.encode(records)), encoder


def learned(row):
    return "".join(chr(token) for token, is_one in zip(row.ids, row.is_learned, strict=True) if is_one)


def chat(*contents):
    roles = ("user", "assistant") * len(contents)
    return ChatRecord("here", tuple(map(ChatMessage, roles, contents)))


def test_only_the_completion_and_its_end_are_learned():
    [row], _ = encode(PromptRecord("here", "hi? ", "yes"))
    assert row.ids.tolist() == [START, *map(ord, "hi? yes"), END]
    assert learned(row) == "yes" + chr(END)


def test_a_token_across_the_border_belongs_to_the_completion():
    [row], _ = encode(PromptRecord("here", "xa", "by"))
    assert row.ids.tolist() == [START, ord("x"), 0x90, ord("y"), END]
    assert row.is_learned.tolist() == [False, False, True, True, True]


def test_all_answers_of_a_chat_are_learned_with_their_ends():
    [row], encoder = encode(chat("hi", "yo", "more", "no"))
    assert learned(row) == f"yo{chr(END)}no{chr(END)}"
    assert encoder.describe() == ()


def test_of_a_chat_that_the_template_rewrites_the_last_answer_is_learned():
    [row], encoder = encode(chat("hi", "~yo", "more", "~no"), tokenizer=Letters(rewrites=True))
    assert learned(row) == f"~no{chr(END)}"
    assert "only the last answers" in encoder.describe()[0]


def test_a_chat_that_the_template_refuses_is_named():
    with pytest.raises(ConfigError, match=r"^here: the model's chat template refuses it: a user begins$"):
        encode(ChatRecord("here", (ChatMessage("assistant", "yo"),)))
    plain = Letters()
    plain.chat_template = None
    with pytest.raises(ConfigError, match=r"here is a chat, but the model's tokenizer has no chat template"):
        encode(chat("hi", "yo"), tokenizer=plain)


def test_long_text_becomes_several_rows_and_long_prompts_are_cut():
    rows, encoder = encode(TextRecord("here", "x" * 10), max_length=5)
    assert [len(row) for row in rows] == [5, 5, 2]
    assert encoder.describe() == ()
    rows, encoder = encode(
        PromptRecord("here", "hi", "long answer"),
        PromptRecord("there", "a long question", "no"),
        max_length=6,
    )
    assert [learned(row) for row in rows] == ["lon"]
    assert encoder.describe() == (
        "2 records longer than 6 tokens: the rest is cut (max_length)",
        "1 record left out: nothing in it can be learned",
    )


def test_empty_text_is_left_out():
    rows, encoder = encode(TextRecord("here", "  "), TextRecord("here", "x"))
    assert len(rows) == encoder.num_left_out == 1


def test_labels_are_one_ahead_and_padding_is_not_learned():
    rows, _ = encode(PromptRecord("here", "q", "yz"), TextRecord("here", "x"))
    table = pad_rows(rows, 0, 8)
    assert table.input_ids.tolist()[0] == [START, ord("q"), ord("y"), ord("z"), END, 0, 0, 0]
    assert table.labels.tolist() == [
        [NOT_LEARNED, ord("y"), ord("z"), END, *[NOT_LEARNED] * 4],
        [ord("x"), END, *[NOT_LEARNED] * 6],
    ]
    assert (table.num_learned, table.num_tokens, table.positions) == (5, 8, None)
    assert table.padding_share == 0.5


def test_the_scale_makes_a_mean_over_rows_one_over_tokens():
    rows, _ = encode(PromptRecord("here", "q", "yz"), TextRecord("here", "x"))
    table = pad_rows(rows, 0, 8)
    losses = np.where(table.labels == NOT_LEARNED, 0.0, np.arange(16).reshape(2, 8))
    mean = (losses.sum(1) * table.fields["loss_scale"]).mean()
    assert mean == pytest.approx(losses.sum() / table.num_learned)


def test_packed_rows_hold_all_tokens_each_with_its_own_positions():
    texts = ["abcdef"[:size] * 2 for size in (1, 2, 3, 4, 5, 6)]
    rows, _ = encode(*(TextRecord("here", text) for text in texts), max_length=16)
    table = pack_rows(rows, 0, 16)
    padded = pad_rows(rows, 0, 16)
    assert len(table) < len(padded)
    assert table.num_learned == padded.num_learned
    assert table.num_tokens == padded.num_tokens
    assert table.positions is not None
    starts = (table.positions == 0) & (table.input_ids != 0)
    assert starts.sum() == len(rows)
    assert (table.input_ids[starts] == START).all()
    before = np.roll(starts, -1, axis=1)
    assert (table.labels[before] == NOT_LEARNED).all(), "no row learns the first token of the next"


def test_a_split_keeps_every_row_once_and_at_least_one_for_each_side():
    rows, _ = encode(*(TextRecord("here", f"{number}") for number in range(40)))
    train, validation = split_rows(rows, 0.1, np.random.default_rng(3))
    assert (len(train), len(validation)) == (36, 4)
    assert {id(row) for row in (*train, *validation)} == {id(row) for row in rows}
    again = split_rows(rows, 0.1, np.random.default_rng(3))[1]
    assert [id(row) for row in again] == [id(row) for row in validation]
    assert [len(part) for part in split_rows(rows[:2], 0.01, np.random.default_rng(3))] == [1, 1]
    assert [len(part) for part in split_rows(rows, 0.0, np.random.default_rng(3))] == [40, 0]
