"""A report in headless Chromium, in a network namespace without a network where that can be made."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from matplotlib import image

from megatron_acco.cli.main import main
from megatron_acco.report.figures import DARK, LIGHT, Theme
from tests.unit.test_report import Page, write_acco, write_zero1

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH (scripts/browser.sh installs it for root)")

# Runs in a copy of the page that allows it, after everything has been laid out.
PROBE = """<script>addEventListener("load", () => { const found = {};
for (const section of document.querySelectorAll("section")) found[section.id] =
  [...section.querySelectorAll("img, table")].map(e => { const box = e.getBoundingClientRect();
    return [e.tagName, box.width, box.height, e.naturalWidth || 0]; });
const out = document.createElement("script"); out.type = "application/json"; out.id = "found";
out.textContent = JSON.stringify({sections: found, wide: document.documentElement.scrollWidth});
document.body.append(out); });</script>"""


def browse(page: Path, *arguments: str, width: int = 1200, height: int = 1000) -> subprocess.CompletedProcess[str]:
    """Open a page; what it says on its console stands in stderr."""
    alone = ["unshare", "--net"]
    if os.geteuid() != 0 or subprocess.run([*alone, "true"], capture_output=True).returncode != 0:
        alone = []
    flags = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync "
        "--disable-component-update --hide-scrollbars --enable-logging=stderr --host-resolver-rules=MAP_*_~NOTFOUND"
    )
    words = [flag.replace("_", " ") for flag in flags.split()]
    profile = page.with_name("profile")
    command = [*alone, str(BROWSER), *words, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
    result = subprocess.run(
        [*command, *arguments, page.as_uri()], capture_output=True, text=True, timeout=60, check=True
    )
    shutil.rmtree(profile)
    assert "CONSOLE" not in result.stderr, result.stderr
    return result


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a plain and an ACCO run."""
    folder = tmp_path_factory.mktemp("browser")
    runs = [str(write_zero1(folder / "zero1")), str(write_acco(folder / "acco"))]
    assert main(["report", *runs, "--out", str(folder / "report.html"), "--title", "Two runs"]) == 0
    return folder / "report.html"


def test_everything_is_there_at_a_size_that_can_be_read(report: Path) -> None:
    text = report.read_text()
    assert text.count("default-src 'none'") == 1
    probed = report.with_name("probed.html")
    allowed = text.replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    probed.write_text(allowed.replace("</body>", f"{PROBE}</body>"))
    for width in (1200, 500):
        dom = browse(probed, "--dump-dom", width=width).stdout
        found = json.loads(re.findall(r'<script type="application/json" id="found">(.*?)</script>', dom)[0])
        shown = found["sections"]
        assert list(shown) == [
            *("summary", "loss", "throughput", "communication", "gradient", "batch", "ranks", "timeline-2"),
            *("configuration", "versions"),
        ]
        for name in list(shown)[1:-2]:
            ((tag, wide, high, natural),) = shown[name]
            assert tag == "IMG" and natural > 1000 and width / 2 < wide < width and high > wide / 5, name
        for name in ("summary", "configuration", "versions"):
            assert shown[name][0][0] == "TABLE" and shown[name][0][2] > 50
        assert found["wide"] == width  # tables scroll in themselves
        page = Page(dom)
        assert "zero1" in page.text["summary"] and "1.921 x" in page.text["summary"]
        assert '"acco"' in page.text["configuration"] and "2.13.0" in page.text["versions"]
        assert not [link for link in page.links if not link.startswith(("data:image/png;base64,", "#"))]


@pytest.mark.parametrize(("theme", "flag"), [(LIGHT, "1"), (DARK, "0")])
def test_what_it_looks_like_in_both_themes(theme: Theme, flag: str, report: Path) -> None:
    """The page as it is: the background is the theme's, and the curves of both runs are on it."""
    shot = report.with_name("shot.png")
    browse(report, f"--screenshot={shot}", f"--blink-settings=preferredColorScheme={flag}", height=2000)
    pixels = (255 * image.imread(shot)[..., :3]).round().astype(int)
    assert pixels.shape == (2000, 1200, 3)

    def share(color: str) -> float:
        wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        return float((abs(pixels - wanted).max(axis=-1) <= 2).mean())

    assert share(theme.paper) > 0.5
    assert all(share(theme.color(i)) > 2e-4 for i in (0, 1))
    assert all(share(other.paper) < 0.05 for other in (LIGHT, DARK) if other is not theme)
