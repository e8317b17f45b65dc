"""The docs site: every page of the repository as it is, and three kinds of pages that are made from the code.

The source folder is the root of the repository, so that links between pages mean the same here and in a
checkout. `make docs` builds it into build/site; a warning is an error.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

project = "Ravnest"
author = "The Ravnest maintainers"
copyright = f"{author}; MIT licence"  # noqa: A001 - Sphinx names it
root_doc = "docs/index"
extensions = ["myst_parser", "sphinx.ext.autodoc", "made_pages"]
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/decisions/*.md",
    "docs/studies/*.md",
    "benchmarks/reports/*.md",
]

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block"]
default_role = "code"  # docstrings quote names with single backticks

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 90
highlight_language = "text"

html_theme = "furo"
html_title = "Ravnest"
html_extra_path = ["start"]
html_copy_source = False
html_show_sphinx = False
