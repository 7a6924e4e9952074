"""Reports: the numbers that they show, the page that holds them, and records of every kind of malice."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from ouro_build.artifacts.console import exit_code
from ouro_build.artifacts.parts import find_part
from ouro_build.artifacts.reader import open_artifact
from ouro_build.artifacts.records import CoverageRecord, KeyCount, StartupRecord, StepCount, encode_record
from ouro_build.builder.artifact_cli import cli
from ouro_build.builder.report import charts
from ouro_build.builder.report.compose import compose
from ouro_build.builder.report.html import draw_html
from ouro_build.builder.report.numbers import change, compact, percent, rate, seconds
from ouro_build.builder.report.page import Chart, Page, Section, Table
from ouro_build.builder.report.sources import gather
from tests.artifact_maker import make_artifact
from tests.unit.builder import report_samples as samples

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Document(HTMLParser):
    """A page taken apart: balanced or not, with the attributes of every element."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_artifact(tmp_path_factory.mktemp("report") / "made.ouro")
    samples.write_observed(path)
    return path


@pytest.fixture
def records(tmp_path: Path) -> Path:
    for name, record in (
        ("s", samples.STARTUP),
        ("c", samples.COVERAGE),
        ("s_old", samples.EARLIER_STARTUP),
        ("c_old", samples.EARLIER_COVERAGE),
        ("s_evil", samples.EVIL_STARTUP),
        ("c_evil", samples.EVIL_COVERAGE),
    ):
        (tmp_path / f"{name}.json").write_bytes(encode_record(record))
    return tmp_path


def page_of(artifact: Path | None, folder: Path, startup: str = "s", coverage: str = "c", against: bool = True) -> Page:
    older = [folder / "s_old.json", folder / "c_old.json"] if against else []
    opened = None if artifact is None else open_artifact(artifact, "sizes")
    return compose(gather(opened, None, folder / f"{startup}.json", folder / f"{coverage}.json", older))


def section(page: Page, key: str) -> Section:
    return next(s for s in page.sections if s.key == key)


def table(page: Page, key: str, figure: int = 0) -> Table:
    return section(page, key).figures[figure].table


def chart(page: Page, key: str, figure: int = 0) -> Chart:
    found = section(page, key).figures[figure].chart
    assert found is not None
    return found


def test_sections_of_an_artifact_and_of_a_worker(artifact: Path, records: Path) -> None:
    worker = ["startup", "startup-difference", "coverage", "fallbacks", "padding", "coverage-difference"]
    of_artifact = ["artifact", "fit", "memory", "graphs", "images"]
    assert [s.key for s in page_of(artifact, records).sections] == of_artifact + worker
    assert [s.key for s in page_of(None, records).sections] == worker
    bare = compose(gather(open_artifact(artifact, "sizes"), None, None, None, []))
    assert [s.key for s in bare.sections] == [*of_artifact, "startup", "coverage"]
    assert "--startup S.json" in section(bare, "startup").note
    assert "--coverage C.json" in section(bare, "coverage").note


def test_what_is_in_an_artifact(artifact: Path, records: Path) -> None:
    page = page_of(artifact, records)
    assert ("identity", open_artifact(artifact, "sizes").identity) in section(page, "artifact").facts
    fits = {row[0]: row[2:4] for row in table(page, "fit").rows}
    assert fits["h200"] == ("yes", "h200")
    assert fits["h100"] == ("yes", "h200")
    assert fits["b200"] == ("no", "–")
    graphs = table(page, "graphs")
    assert [(r[0], r[2], r[3], r[4], r[5], r[7]) for r in graphs.rows] == [
        ("recurrent", "2", "2", "16,384", "NO", "812"),
        ("prelude", "1", "1", "8,192", "yes", "812"),
    ]
    assert graphs.bad == {0}
    assert section(page, "graphs").facts[0] == ("h200", "2 graphs of 3 kernel nodes; 1 verified on NVIDIA H200")
    assert "not verified" in section(page, "graphs").facts[1][1]
    assert sum(s.style == "bad" for s in chart(page, "graphs").shapes) == 1
    assert table(page, "images").rows[0][:4] == ("gather", "32", "0", "1,024")


def test_the_memory_map_is_to_scale(artifact: Path, records: Path) -> None:
    part = find_part("rtx-5090")
    rows = {row[0]: int(row[2].replace(",", "")) for row in table(page_of(artifact, records), "memory", 1).rows}
    assert sum(rows.values()) == part.memory
    assert rows["reserve"] == 1 << 30
    shapes = chart(page_of(artifact, records), "memory", 1).shapes
    whole = [s for s in shapes if s.style.startswith("pool-") and s.y < 40]
    for name, count in rows.items():
        drawn = sum(s.width for s in whole if s.style == "pool-" + name.replace(" ", "-"))
        assert drawn == pytest.approx(100 * count / part.memory), name
    ends = [s.x + s.width for s in whole]
    assert [s.x for s in whole] == pytest.approx([0.0, *ends[:-1]])
    assert ends[-1] == pytest.approx(100)
    enlarged = [s for s in shapes if s.style.startswith("pool-") and s.y > 40]
    assert sum(s.width for s in enlarged) == pytest.approx(100)
    # In the same proportions among themselves.
    by_name = {s.style: s.width for s in enlarged}
    assert by_name["pool-kv"] / by_name["pool-workspace"] == pytest.approx(rows["kv"] / rows["workspace"])


def test_the_waterfall(records: Path) -> None:
    page = page_of(None, records)
    assert section(page, "startup").facts == (
        ("first token after", "800.0 ms"),
        ("in named phases", "53.1 % of it"),
        ("graphs restored", "5, 40 kernel nodes, 1.25e+03 µs a node"),
    )
    rows = {row[0]: row[1:] for row in table(page, "startup").rows}
    assert rows["graphs"][:3] == ("load, beside it", "700.0 ms", "50.0 ms")
    assert rows["weights"] == ("load", "250.0 ms", "500.0 ms", "62.5 %", "2.00 GiB", "4.00 GiB/s")
    drawn = [s for s in chart(page, "startup").shapes if s.style.startswith("depth-")]
    assert [(s.style, round(s.x, 4), round(s.width, 4)) for s in drawn] == [
        ("depth-0", 0.0, 15.625), ("depth-0", 15.625, 78.125), ("depth-1", 31.25, 62.5), ("depth-2", 31.25, 31.25),
        ("depth-0", 93.75, 6.25),
    ]  # fmt: skip
    indents = {s.label: s.width for s in chart(page, "startup").shapes if s.style == "label"}
    assert indents["load"] == 0 < indents["weights"] < indents["hashing"]


def test_coverage_and_what_was_not_covered(records: Path) -> None:
    page = page_of(None, records)
    facts = dict(section(page, "coverage").facts)
    assert facts == {
        "coverage share": percent(samples.COVERAGE.share),
        "padded share": percent(samples.COVERAGE.padded_share),
        "replays a step": "4.36",
        "decode steps": "11, 1 of them split",
    }
    rows = {(row[0], row[2]): row[3:] for row in table(page, "coverage").rows}
    assert rows["recurrent", "4"] == ("40", "130", "30", "18.8 %")
    assert rows["recurrent", "1"] == ("0", "0", "0", "–"), "declared, and never replayed"
    cells = [s.label for s in chart(page, "coverage").shapes if s.kind == "rect" and s.label]
    assert "recurrent/dense, 4: 40" in cells
    assert "recurrent/dense, 1: 0" in cells
    assert "prefill/dense, 4: not built" in cells
    assert table(page, "fallbacks").rows == (
        ("bucket_miss", "20", "4", "80", "recurrent", "dense", "split"),
        ("graph_restore_failed", "14", "2", "28", "coda", "dense", "launch"),
    )
    assert table(page, "padding").rows[0] == ("recurrent/dense", "4", "130", "30", "18.8 %", "42.9 %")
    padded = {row[1]: row[3] for row in table(page, "padding").rows if row[0] == "recurrent/dense"}
    assert padded == {"4": "30", "16": "16"}


def test_differences(records: Path) -> None:
    page = page_of(None, records)
    rows = {row[0]: row[2:] for row in table(page, "startup-difference").rows}
    assert rows["all, to the first token"] == ("1.600 s", "800.0 ms", "-800.0 ms", "-50.0 %")
    assert rows["load"] == ("1.250 s", "625.0 ms", "-625.0 ms", "-50.0 %")
    assert rows["gone"] == ("250.0 ms", "0.0 ms", "-250.0 ms", "-100.0 %")
    assert rows["hashing"][-1] == "new"
    shares = {row[0]: row[1:] for row in table(page, "coverage-difference").rows}
    now, before = samples.COVERAGE, samples.EARLIER_COVERAGE
    gained = 100 * (now.share - before.share)
    assert shares["coverage share"] == (percent(before.share), percent(now.share), f"{gained:+.1f} points")
    replays = {(row[0], row[2]): row[3:] for row in table(page, "coverage-difference", 1).rows}
    assert replays["recurrent", "16"] == ("48", "8", "526", "16")
    assert replays["recurrent", "4"] == ("0", "40", "0", "30")
    assert table(page, "coverage-difference", 2).rows[0][-3:] == ("0", "80", "+80")


@pytest.mark.parametrize("evil", [False, True])
def test_the_page_stands_alone_and_every_chart_has_its_table(artifact: Path, records: Path, evil: bool) -> None:
    page = page_of(artifact, records, *(("s_evil", "c_evil") if evil else ()))
    text = draw_html(page)
    document = Document(text)
    ids = [a["id"] for _, a in document.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for _, attributes in document.elements:
        for name in ("aria-labelledby", "aria-describedby"):
            assert attributes.get(name, ids[0]) in ids
        assert not {"src", "srcset", "onload", "onerror", "onclick"} & set(attributes)
        assert attributes.get("href", "#").startswith("#")
    assert not re.search(r"@import|url\(|https?:", text)
    assert {"script", "img", "link", "iframe", "object"}.isdisjoint(name for name, _ in document.elements)
    drawn = [a for a in document.all("svg") if a.get("role") == "img"]
    assert len(drawn) == sum(f.chart is not None for s in page.sections for f in s.figures) > 8
    assert all(a["aria-describedby"].endswith("-caption") for a in drawn)
    assert len(document.all("table")) == len(document.all("caption")) == sum(len(s.figures) for s in page.sections)
    assert {a.get("scope") for a in document.all("th")} == {"col", "row"}
    assert "default-src 'none'" in text


def test_hostile_names_are_shown_and_do_nothing(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = draw_html(page_of(None, records, "s_evil", "c_evil"))
    assert "<script" not in text
    assert "<img" not in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", text)
    shown = "".join(Document(text).text)
    assert '<script>alert("x")</script>\\x1b[31m\\u202e"><img' in shown
    files = ["--startup", str(records / "s_evil.json"), "--coverage", str(records / "c_evil.json")]
    assert exit_code(cli, ["report", *files, "--text"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u202e" not in out


def places(text: str) -> list[tuple[float, float]]:
    """(beginning, end) across, in percent, of everything drawn."""
    found = []
    for tag, a in Document(text).elements:
        across = [float(a[n].rstrip("%")) for n in ("x", "width", "x1", "x2", "cx") if a.get(n, "").endswith("%")]
        if tag == "rect" and across:
            found.append((across[0], across[0] + across[1]))
        elif tag in ("text", "line", "circle"):
            found += [(x, x) for x in across]
        for name in ("x", "y", "width", "height", "r", "dx", "x1", "x2", "y1", "y2", "cx", "cy", "fill-opacity"):
            assert not re.search("nan|inf|-", a.get(name, "")), (tag, a)
    return found


numbers = st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.floats(0, 10))
phases = st.builds(
    samples.phase, st.sampled_from("abcdé<"), st.sampled_from(["", *"abc"]), numbers, numbers, st.integers(-5, 1 << 70)
)
counts = st.integers(0, samples.MOST)
keys = st.builds(
    KeyCount, program=st.sampled_from(["recurrent", "prefill", "x"]), bucket=st.integers(1, 1 << 20),
    mode=st.sampled_from(["dense", ""]), variant=st.just(""), replays=counts, live_rows=counts, padded_rows=counts,
)  # fmt: skip
steps = st.builds(StepCount, mode=st.just("dense"), rows=st.integers(1, 1 << 20), loops=st.integers(1, 1 << 10), count=counts)


# Without shrinking: a page is drawn in a tenth of a second, and the first case that fails tells enough.
@settings(max_examples=40, phases=[p for p in Phase if p is not Phase.shrink])
@example(-0.0, [samples.phase("a", "", -0.0, -0.0)], [], [])
@given(numbers, st.lists(phases, max_size=5), st.lists(keys, max_size=4), st.lists(steps, max_size=4))
def test_whatever_a_record_holds_the_page_is_drawn_within_its_bounds(
    wall: float, spans: list[Any], replays: list[Any], shapes: list[Any]
) -> None:
    startup = StartupRecord(wall_s=wall, phases=tuple(spans))
    coverage = CoverageRecord(
        keys=tuple(replays), fallbacks=samples.COVERAGE.fallbacks, steps=tuple(shapes), graphs=samples.COVERAGE.graphs
    )
    report = gather_of(startup, coverage)
    for begin, end in places(draw_html(compose(report))):
        assert 0 <= begin <= end <= 100.01


def gather_of(startup: StartupRecord, coverage: CoverageRecord) -> Any:
    from ouro_build.builder.report.sources import Report

    return Report(
        name="x", artifact=None, fit=(), observed=(), startup=startup, coverage=coverage,
        startup_before=samples.STARTUP, coverage_before=samples.COVERAGE, notes=(),
    )  # fmt: skip


def test_a_chart_of_many_rows_draws_the_first_and_says_so() -> None:
    rows = [charts.Bar(f"row {i}", "", (charts.Segment(i, "live", ""),)) for i in range(500)]
    drawn = charts.bars("many", rows)
    assert drawn.title == "many; the first 40 of 500, all are in the table"
    assert sum(s.style == "label" for s in drawn.shapes) == 40
    grid = charts.heat("wide", ["a"], [str(i) for i in range(5000)], {(0, 4999): 1.0}, wrong=set())
    assert len(grid.shapes) < 300
    assert len(charts.columns("high", {1 << 20: 3, 1: 1}, (1, 4)).shapes) < 20


def test_numbers() -> None:
    assert [compact(v) for v in (0, 7, 950, 1234, 10_336, 2_500_000, 9e9)] == ["0", "7", "950", "1.2k", "10k", "2.5M", "9.0G"]
    assert [seconds(v) for v in (0, 2e-6, 0.0123, 1.5, 1e300)] == ["0.0 ms", "2 µs", "12.3 ms", "1.500 s", "1e+300 s"]
    assert (rate(1 << 30, 0.5), rate(5, 0), rate(-1, 1)) == ("2.00 GiB/s", "", "")
    assert (change(1, 1), change(0, 2), change(2, 1), change(1e-9, 1)) == ("=", "new", "-50.0 %", "× 1e+09")
    marks = charts.ticks(0.742, " ms", 1e3)
    assert [*marks] == pytest.approx([0, 0.2, 0.4, 0.6])
    assert [*marks.values()] == ["0 ms", "200 ms", "400 ms", "600 ms"]
    assert charts.ticks(0) == {}


class TestCommand:
    def run(self, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
        code = exit_code(cli, ["report", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    def test_page_text_and_json(self, artifact: Path, records: Path, capsys: pytest.CaptureFixture[str]) -> None:
        page = records / "new" / "report.html"
        page.parent.mkdir()
        flags = ("--startup", records / "s.json", "--coverage", records / "c.json", "--against", records / "c_old.json")
        assert self.run(capsys, artifact, "-o", page, *flags) == (0, "", f"report written to {page}\n")
        first = page.read_bytes()
        assert b"Report on made.ouro" in first
        assert [p.name for p in page.parent.iterdir()] == ["report.html"]
        assert self.run(capsys, artifact, "-o", page, *flags)[0] == 0
        assert page.read_bytes() == first, "the same inputs, the same bytes"
        code, out, err = self.run(capsys, *flags, "--text")
        assert (code, err) == (0, "")
        for piece in ("Report on a worker", "Fallbacks", "interpreter and imports", "graph_restore_failed", "before"):
            assert piece in out
        code, out, err = self.run(capsys, artifact, *flags, "--json")
        assert (code, err) == (0, "")
        said = json.loads(out)
        assert said["observed"][0]["device"]["name"] == "NVIDIA H200"
        assert said["coverage_before"]["keys"][0]["replays"] == 48

    def test_records_beside_the_artifact_are_found(self, records: Path, capsys: pytest.CaptureFixture[str]) -> None:
        made = make_artifact(records / "other.ouro", ("h200",))
        folder = records / "observed"
        folder.mkdir()
        (folder / "s.json").write_bytes(encode_record(samples.STARTUP))
        (folder / "c.json").write_bytes(encode_record(samples.COVERAGE))
        (folder / "w.json").write_bytes(encode_record(samples.observed("1" * 64)))
        (folder / "b.json").write_bytes(b'{"schema":"ouro-bench/1"}')
        code, out, _ = self.run(capsys, made, "--record", folder, "--json")
        said = json.loads(out)
        assert (code, said["observed"], said["startup"]["wall_s"]) == (0, [], 0.8)
        assert said["notes"] == ["w.json is about another artifact, 111111111111…: left out"]
        code, out, _ = self.run(capsys, made, "--record", folder, "--text")
        assert "w.json is about another artifact" in out
        (folder / "w.json").write_bytes(b'{"schema":"ouro-observed/1"')
        code, out, err = self.run(capsys, made, "--record", folder, "--text")
        assert (code, out) == (2, "")
        assert f"{folder / 'w.json'}: not a record of this kind" in err

    @pytest.mark.parametrize(
        ("flags", "code", "message"),
        [
            (["--startup", "s.json"], 2, "Give -o FILE.html, --text or --json"),
            (["--text"], 2, "there is nothing to report on"),
            (["--startup", "none.json", "--text"], 2, "none.json: cannot be read"),
            (["--startup", "c.json", "--text"], 2, "ouro-startup/"),
            (["--coverage", "s.json", "--text"], 2, "ouro-coverage/2"),
            (["--startup", "s.json", "--against", "c_old.json", "--text"], 2, "c_old.json: there is nothing that it can be"),
            (["--startup", "s.json", "--against", "s.json", "--against", "s_old.json", "--text"], 2, "one of each"),
            (["--startup", "s.json", "--against", "broken.json", "--text"], 2, "broken.json: not a record"),
            (["--startup", "s.json", "-o", "s.json/report.html"], 2, "the folder it is to be in does not exist"),
            (["nowhere.ouro", "--text"], 2, "no such artifact"),
        ],
    )
    def test_what_cannot_be_reported(
        self, records: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
        flags: list[str], code: int, message: str,
    ) -> None:  # fmt: skip
        (records / "broken.json").write_bytes(encode_record(samples.STARTUP)[:-9])
        monkeypatch.chdir(records)
        found, out, err = self.run(capsys, *flags)
        assert (found, out) == (code, "")
        assert message in err
