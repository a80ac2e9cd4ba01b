"""Sphinx configuration of the manual. `make docs` builds it; a warning is an error."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import _gen

import tilewright

project = "Tilewright"
author = "Tilewright contributors"
release = version = tilewright.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = [
    "_build",
    "_generated/ops.md",
    "_generated/kernels.md",
]  # the tables are included in a page
default_role = "code"  # docstrings mark code with single backticks

html_theme = "furo"
html_title = f"Tilewright {release}"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

_CODE = re.compile(r"(``.+?``|`[^`]+`)", re.DOTALL)


def _plain_text_to_rst(app, what, name, obj, options, lines: list[str]) -> None:
    """Docstrings are plain text with code in backticks. Escape what reStructuredText would read into the
    rest, and keep the line breaks of paragraphs that are laid out by indentation."""
    text = _CODE.sub(lambda m: re.sub(r"\s*\n\s*", " ", m[0]), "\n".join(lines))
    parts = _CODE.split(text)
    parts[::2] = [re.sub(r"[*|\\]|(?<=\w)_(?!\w)", r"\\\g<0>", part) for part in parts[::2]]
    out: list[str] = []
    for paragraph in re.split(r"\n\s*\n", "".join(parts).strip("\n")):
        rows = paragraph.split("\n")
        laid_out = any(row.startswith(" ") for row in rows)
        out += [f"| {row}" if laid_out else row for row in rows] + [""]
    lines[:] = out


def setup(app) -> None:
    _gen.write(Path(__file__).parent / "_generated")
    app.connect("autodoc-process-docstring", _plain_text_to_rst)
