"""Every example is listed, is compared with a plain loop, and says how it is run; none needs torch here."""

import ast
import re
from pathlib import Path

import pytest

from benchmarks.gallery_runs import GALLERY

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples").glob("*/model.py"))
PAGES = [(ROOT / name).read_text("utf-8") for name in ("docs/examples.md",)]
STARTS = {"digits", "own_model", "tiny_gpt"}  # to start from; the demo and the quality benchmark measure such


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_an_example_is_listed_and_says_how_it_is_run(file):
    name = file.parent.name
    said = ast.get_docstring(ast.parse(file.read_text("utf-8")))
    assert re.search(rf"^ravnest \w+ examples/{name}/model\.py:job", said, re.MULTILINE)
    assert all(f"../examples/{name}/model.py" in page for page in PAGES)


def test_the_gallery_is_measured():
    assert {file.parent.name for file in FILES} == GALLERY.keys() | STARTS
