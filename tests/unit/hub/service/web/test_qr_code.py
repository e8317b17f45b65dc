"""QR codes of lines: the path has every dark module once, and the code is the one of the line."""

import re

import pytest
import segno

from ravnest.hub.service.web.actions import draw_code

LINE = "ravnest join rvn1_" + "abcdefgh234567" * 13


@pytest.mark.parametrize("text", ["a", LINE])
def test_the_path_has_each_dark_module_once(text):
    code = draw_code(text)
    dark = []
    for column, row, width in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\3z", code.path):
        dark += [(int(row), int(column) + step) for step in range(int(width))]
    matrix = segno.make_qr(text, error="m").matrix
    wanted = [
        (row, column) for row, line in enumerate(matrix) for column, is_dark in enumerate(line) if is_dark
    ]
    assert sorted(dark) == wanted
    assert code.size == len(matrix)
    assert re.fullmatch(r"[Mhvz0-9 -]*", code.path), "nothing but a path"


def test_an_invitation_is_small_enough_for_a_phone_to_read():
    assert draw_code(LINE).size <= 65
