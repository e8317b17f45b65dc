"""Which captured models can go on with a text, and the program that does it.

A language model gives logits, (rows, places, words), of rows of tokens. What it says of the next token is
computed by its evaluation program on the way to the loss. So a generation program is that program without
what only the loss needs: nothing else is captured, and a provider runs nothing that it has not checked. Rows
have the length of the data. A shorter text is padded on the right, which a causal model does not look at.
"""

from dataclasses import dataclass, replace

from ravnest.model.blueprint.program import Blueprint, Program, Size
from ravnest.model.blueprint.slicing import keep_needed

LOGITS_RESULT = "logits"
ONES_FIELDS = ("attention_mask",)  # every place counts; a causal model looks at none that comes later
PLACES_FIELDS = ("position_ids",)
ZEROS_FIELDS = ("token_type_ids",)
_KNOWN = (*ONES_FIELDS, *PLACES_FIELDS, *ZEROS_FIELDS)
_ROWS_DIMENSIONS = 2  # rows, places


@dataclass(frozen=True, slots=True)
class TextModel:
    """What a request for text has to know of a model: its rows of tokens, and its words."""

    token_field: str
    length: int  # places of a row
    num_words: int
    dtypes: tuple[tuple[str, str], ...]  # of all fields of a row, by name


def make_generation_program(program: Program) -> Program:
    """Return what an evaluation program does for the next token: logits instead of loss and metrics."""
    if program.logits is None:
        return program
    wanted = replace(program, results=((LOGITS_RESULT, program.logits),), logits=None)
    return keep_needed(wanted, range(len(wanted.ops)))[0]


def find_token_fields(program: Program) -> frozenset[str]:
    """Return the fields of a stage that are tokens: all others say the same of every text."""
    return frozenset(name for _, name in program.fields if name not in _KNOWN)


def find_text_model(blueprint: Blueprint) -> TextModel | str:
    """Return what is to be known of a whole model to go on with texts, or why it cannot."""
    whole = blueprint.evaluate
    if whole.logits is None:
        return "its model gives no logits of (rows, places, words), as a language model does"
    program = make_generation_program(whole)
    rows, length, num_words = program.values[whole.logits].shape
    fields = {name: program.values[value] for value, name in program.fields}
    found = [
        name
        for name, kind in fields.items()
        if kind.dtype.startswith(("int", "uint"))
        and len(kind.shape) == _ROWS_DIMENSIONS
        and kind.shape[1] == length
        and name not in _KNOWN
    ]
    if len(found) != 1 or rows != Size(1) or not isinstance(length, int) or not isinstance(num_words, int):
        shown = ", ".join(map(repr, found)) or "none"
        return f"its logits must come from one field of tokens, with a place for each; found: {shown}"
    strange = next((name for name in fields if name not in (*found, *_KNOWN)), None)
    if strange is not None:
        return f"its model needs the field {strange!r} beside the tokens, which a text does not have"
    known = {name: whole.values[value] for value, name in whole.fields}
    dtypes = tuple((name, kind.dtype) for name, kind in known.items() if name in fields)
    return TextModel(found[0], length, num_words, dtypes)
