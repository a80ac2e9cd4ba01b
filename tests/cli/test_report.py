"""The report page: opened by a headless Chromium where there is one, and what it is made of."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from tests.cli.test_cli import run
from tilewright.cli.report import page

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))), None)

# Appended to a copy of the page: types into the filter, sorts, opens a row by the keyboard, and leaves what it saw in the document.
PROBE = """
<script>
const seen = { rows: document.querySelectorAll("tr.call").length, dots: document.querySelectorAll(".dot").length };
const filter = document.getElementById("filter");
function type(text) { filter.value = text; filter.dispatchEvent(new Event("input")); return document.querySelectorAll("tr.call").length; }
seen.fc = type("fc1");
seen.hidden = document.querySelectorAll(".dot.off").length;
seen.none = type("no such layer");
seen.all = type("");
document.querySelectorAll("th button")[3].click();
seen.sort = document.querySelectorAll("th")[3].getAttribute("aria-sort");
seen.times = [...document.querySelectorAll("tr.call")].map(r => parseFloat(r.children[3].textContent));
const row = document.querySelector("tr.call");
row.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
seen.open = document.querySelectorAll("tr.call[aria-expanded=true]").length;
seen.candidates = document.querySelectorAll("table table tr").length;
seen.focus = document.activeElement.className;
document.body.append(Object.assign(document.createElement("pre"), { id: "seen", textContent: JSON.stringify(seen) }));
</script>
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    told = json.loads(run("report", "lenet", "--input", "1x1x28x28", "-o", "r.html", "--json", cwd=folder).stdout)
    return folder / "r.html", told


def browse(*options: str) -> subprocess.CompletedProcess[str]:
    base = (
        str(CHROMIUM),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        "--virtual-time-budget=3000",
    )
    return subprocess.run([*base, *options], capture_output=True, text=True, timeout=120, check=True)


def test_the_page_needs_nothing_else(written):
    text = written[0].read_text()
    assert written[1]["calls"] == 8
    assert not re.search(r"""(src|href)\s*=|@import|url\(|https?://(?!www\.w3\.org)""", text)


def test_no_text_ends_the_data():
    text = page({"target": "</script><script>alert(1)</script>", "calls": []})
    assert text.count("</script>") == 2
    data = re.search(r'type="application/json">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["target"].startswith("</script>")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)")
def test_it_works_in_a_browser(written, tmp_path):
    probe = tmp_path / "probe.html"
    probe.write_text(written[0].read_text().replace("</body>", PROBE + "</body>"))
    shown = browse("--dump-dom", probe.as_uri())
    assert "CONSOLE" not in shown.stderr
    found = re.search(r'<pre id="seen">(.*?)</pre>', shown.stdout, re.DOTALL)
    assert found is not None
    seen = json.loads(found[1])
    assert seen["rows"] == seen["all"] == 8
    assert seen["dots"] > 5
    assert (seen["fc"], seen["none"]) == (1, 0)
    assert seen["hidden"] == seen["dots"] - 1
    assert seen["sort"] == "descending"
    assert seen["times"] == sorted(seen["times"], reverse=True)
    assert seen["open"] == 1
    assert seen["candidates"] >= 1
    assert seen["focus"] == "call"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)")
def test_it_can_be_seen_in_light_and_dark(written, tmp_path):
    levels = []
    for name, options in (("light", ()), ("dark", ("--blink-settings=preferredColorScheme=0",))):
        file = tmp_path / f"{name}.png"
        browse("--window-size=1000,1400", f"--screenshot={file}", *options, written[0].as_uri())
        pixels = np.asarray(Image.open(file).convert("L"), np.float64)
        top = pixels[: pixels.shape[0] // 2]  # the plot
        assert top.std() > 5, f"{name}: nothing is drawn"
        assert len(np.unique(pixels)) > 50
        levels.append(np.median(pixels))
    assert levels[0] > 200 > 60 > levels[1]
