"""Reports in a real browser: nothing sticks out, no text covers another or is cut, all of it can be read, and it prints."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ouro_build.artifacts.reader import open_artifact
from ouro_build.artifacts.records import encode_record
from ouro_build.builder.report.compose import compose
from ouro_build.builder.report.html import draw_html
from ouro_build.builder.report.sources import gather
from tests.artifact_maker import make_artifact
from tests.unit.builder import report_samples as samples

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt install chromium)")
WIDTHS = {"phone": 390, "desktop": 1440}
HARNESS = """<!DOCTYPE html><meta charset="utf-8"><body style="margin:0"><script>
const seen = {};
function rgb(text) { return (text.match(/[\\d.]+/g) || []).map(Number); }
function light(c) {
  const [r, g, b] = c.slice(0, 3).map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function contrast(a, b) { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); }
function measure(frame) {
  const page = frame.contentDocument, root = page.documentElement, view = frame.contentWindow;
  const paper = rgb(view.getComputedStyle(page.body).backgroundColor), cut = [], covered = [], faint = new Set();
  for (const chart of page.querySelectorAll('svg.chart')) {
    const edge = chart.getBoundingClientRect(), boxes = [];
    for (const text of chart.querySelectorAll('text')) {
      const box = text.getBoundingClientRect();
      if (!box.width) continue;
      if (box.left < edge.left - 1 || box.right > edge.right + 1 || box.bottom > edge.bottom + 1) cut.push(text.textContent);
      for (const [other, name] of boxes)
        if (box.left < other.right - 1 && other.left < box.right - 1
            && box.top < other.bottom - 4 && other.top < box.bottom - 4) covered.push(name + ' / ' + text.textContent);
      boxes.push([box, text.textContent]);
    }
  }
  for (const node of page.querySelectorAll('h1,h2,p,a:not(.skip),dt,dd,th,td,caption,li'))
    if (contrast(rgb(view.getComputedStyle(node).color), paper) < 4.5) faint.add(node.tagName);
  for (const node of page.querySelectorAll('svg .label, svg .note, svg .tick'))
    if (contrast(rgb(view.getComputedStyle(node).fill), paper) < 4.5) faint.add('svg ' + node.getAttribute('class'));
  const outside = [...page.querySelectorAll('h1,h2,p,dl,figure,.scroll,nav,.legend')].filter(
    n => n.getBoundingClientRect().right > root.clientWidth + 1).map(n => n.outerHTML.slice(0, 80));
  const dark = view.matchMedia('(prefers-color-scheme: dark)').matches;
  return {width: root.clientWidth, scroll: root.scrollWidth, charts: page.querySelectorAll('svg.chart').length,
          fetched: view.performance.getEntriesByType('resource').map(e => e.name),
          paper, dark, cut, covered, faint: [...faint], outside};
}
function next(left) {
  if (!left.length) {
    document.body.textContent = JSON.stringify(seen);
    return;
  }
  const [name, width] = left[0], frame = document.createElement('iframe');
  frame.style.cssText = `border:0;width:${width}px;height:900px`;
  frame.onload = () => { seen[name] = measure(frame); frame.remove(); next(left.slice(1)); };
  frame.src = 'REPORT';
  document.body.append(frame);
}
next(Object.entries(WIDTHS));
</script>"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages of an artifact and of a hostile worker's records."""
    folder = tmp_path_factory.mktemp("pages")
    made = make_artifact(folder / "made.ouro")
    samples.write_observed(made)
    wide = msgspec.structs.replace(samples.EVIL_STARTUP.phases[1], name="W" * 200, parent="")
    evil_startup = msgspec.structs.replace(samples.EVIL_STARTUP, phases=(*samples.EVIL_STARTUP.phases, wide))
    files = {}
    for name, record in (
        ("s", samples.STARTUP), ("c", samples.COVERAGE), ("so", samples.EARLIER_STARTUP), ("co", samples.EARLIER_COVERAGE),
        ("se", evil_startup), ("ce", samples.EVIL_COVERAGE),
    ):  # fmt: skip
        files[name] = folder / f"{name}.json"
        files[name].write_bytes(encode_record(record))
    older = [files["so"], files["co"]]
    plain = gather(open_artifact(made, "sizes"), None, files["s"], files["c"], older)
    evil = gather(None, None, files["se"], files["ce"], older)
    (folder / "plain.html").write_text(draw_html(compose(plain)))
    (folder / "evil.html").write_text(draw_html(compose(evil)))
    return folder


def chromium(profile: Path, *arguments: str) -> str:
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
    done = subprocess.run([CHROMIUM, *flags, *arguments], capture_output=True, text=True, timeout=240, check=True)
    return done.stdout


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["plain", "evil"])
def test_nothing_sticks_out_and_all_can_be_read(reports: Path, tmp_path: Path, name: str, dark: bool) -> None:
    harness = reports / f"{name}-{dark}-harness.html"
    script = HARNESS.replace("REPORT", f"{name}.html").replace("WIDTHS", json.dumps(WIDTHS))
    harness.write_text(script)
    printed = chromium(
        tmp_path, "--allow-file-access-from-files", f"--blink-settings=preferredColorScheme={int(not dark)}",
        "--window-size=1500,1000", "--virtual-time-budget=20000", "--dump-dom", harness.as_uri(),
    )  # fmt: skip
    found = re.search(r"<body[^>]*>(\{.*\})</body>", printed, re.DOTALL)
    assert found is not None, printed[-500:]
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    for view, width in WIDTHS.items():
        one = seen[view]
        assert (one["width"], one["dark"]) == (width, dark)
        assert one["scroll"] <= width, view
        assert (one["outside"], one["cut"], one["covered"], one["faint"], one["fetched"]) == ([], [], [], [], []), view
        assert one["charts"] > 5
        assert (max(one["paper"][:3]) < 60) is dark


def test_it_is_drawn_and_prints(reports: Path, tmp_path: Path) -> None:
    picture, paper = tmp_path / "page.png", tmp_path / "page.pdf"
    page = (reports / "plain.html").as_uri()
    chromium(tmp_path / "profile", "--window-size=800,1200", f"--screenshot={picture}", page)
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert picture.stat().st_size > 20_000, "an empty page would be smaller"
    chromium(tmp_path / "profile", f"--print-to-pdf={paper}", page)
    assert paper.read_bytes()[:5] == b"%PDF-"
    assert len(re.findall(rb"/Type\s*/Page\b", paper.read_bytes())) > 3
