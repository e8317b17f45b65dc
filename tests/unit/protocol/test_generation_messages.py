"""Messages about texts are bounded: the largest answer fits in a header, a larger one is refused."""

import pytest

from ravnest.errors import ProtocolError
from ravnest.protocol.generation import (
    MOST_CHOICES,
    MOST_ROWS,
    GenerationAnswer,
    GenerationStep,
    TokenChoices,
)
from ravnest.protocol.messages import MOST_HEADER_BYTES, pack, unpack


def make_answer(num_rows: int, num_words: int) -> GenerationAnswer:
    row = TokenChoices(tuple(range(2**31 - num_words, 2**31)), tuple(-1.5 - x / 3 for x in range(num_words)))
    return GenerationAnswer(1, 2, 3, (row,) * num_rows)


def test_the_largest_answer_fits_and_comes_back_as_it_was():
    header = pack(make_answer(MOST_ROWS, MOST_CHOICES))
    assert len(header) < MOST_HEADER_BYTES
    assert unpack(header) == make_answer(MOST_ROWS, MOST_CHOICES)


@pytest.mark.parametrize(
    "message",
    [
        make_answer(MOST_ROWS + 1, 4),
        make_answer(1, MOST_CHOICES + 1),
        make_answer(1, 0),
        make_answer(0, 1),
        GenerationAnswer(1, 2, 3, (TokenChoices((1,), (float("nan"),)),)),
        GenerationStep(1, 2, 3, 8, 0, (1,), MOST_CHOICES + 1, ()),
        GenerationStep(1, 2, 3, 8, 0, (), 4, ()),
        GenerationStep(1, 2, -1, 8, 0, (1,), 4, ()),
    ],
)
def test_what_is_out_of_bounds_is_no_message(message):
    with pytest.raises(ProtocolError):
        pack(message)
