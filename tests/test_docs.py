"""The Python examples of README and manual run as printed: those of one page in order, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MANUAL = sorted(p for p in (ROOT / "docs").rglob("*.md") if "_generated" not in p.parts)
PAGES = [ROOT / "README.md", *MANUAL]


def examples(page: Path) -> list[tuple[int, str]]:
    """(number of lines before it, code) of each fenced Python block."""
    text = page.read_text()
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: m.start(1)].count("\n"), m[1]) for m in found]


@pytest.mark.parametrize("page", [p for p in PAGES if examples(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "example"}
    for line, code in examples(page):
        # Blank lines in front make a traceback name the page's own line.
        exec(compile("\n" * line + code, str(page), "exec"), names)
