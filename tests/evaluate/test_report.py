"""The page needs nothing from outside, says every number in words and tables, and opens in a browser."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.evaluate.conftest import FakeTarget
from trtspec.evaluate.data import Prompt, PromptSet
from trtspec.evaluate.lossless import Difference, LosslessReport
from trtspec.evaluate.record import RunRecord, RunSettings
from trtspec.evaluate.report import render_html, render_terminal
from trtspec.evaluate.report.charts import Curve, Series, bars, cumulative, curves, rows, ticks
from trtspec.evaluate.report.page import STYLE
from trtspec.evaluate.run import EvalRequest, evaluate
from trtspec.events import silent

VOID = {"meta", "line", "rect", "polyline", "br"}


class Page(HTMLParser):
    """Checks nesting, and collects what a browser would fetch, the texts, and the labels of images."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.images: list[str] = []
        self.seen: list[str] = []
        self.tables = self.captions = 0
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.fetched += [
            f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "data", "srcset")
        ]
        if tag in ("script", "link", "iframe", "object", "embed", "img"):
            self.fetched.append(tag)
        if tag == "svg" and found.get("aria-hidden") != "true":
            assert found["role"] == "img"
            self.images.append(found["aria-label"] or "")
        self.tables += tag == "table"
        self.captions += tag == "caption"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.seen.append(data.strip())


@pytest.fixture
def record(prompts: tuple[Prompt, ...], tmp_path: Path) -> RunRecord:
    target, plain = FakeTarget(accepted=(2, 0, 3), seconds_per_step=0.001), FakeTarget(seconds_per_step=0.001)
    settings = RunSettings(output_length=9)
    asked = EvalRequest(
        "quick <start> & co",
        target,
        plain,
        PromptSet("here", prompts, ()),
        prompts,
        settings,
        command="trtspec eval build/x --set name='<b>'",
        config="name: quick\n",
        plan={"candidates": [{"draft_length": 3, "acceptance_length": 2.5, "step_ms": 1.0, "speedup": 2.0}]},
    )
    return evaluate(asked, tmp_path, silent)


def test_the_page_refers_to_nothing_outside_itself(record: RunRecord) -> None:
    text = render_html([record])
    page = Page(text)
    assert page.fetched == []
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|url\(|@import", text)


def test_the_page_holds_the_numbers_and_the_verdict(record: RunRecord) -> None:
    seen = Page(render_html([record])).seen
    for text in ("2.67", "55.6\u202f%", "66.7\u202f%", "100.0\u202f%", "50.0\u202f%", "quick <start> & co"):
        assert text in seen, text
    assert "All 7 compared requests gave the same tokens as without speculation." in seen
    assert "trtspec eval build/x --set name='<b>'" in seen
    assert "Plan against measurement" in seen and "2.50" in seen
    assert any(record.summary()["speedup"] and f"{record.summary()['speedup']:.2f}×" in text for text in seen)


def test_charts_are_described_and_stand_beside_tables(record: RunRecord) -> None:
    page = Page(render_html([record]))
    assert len(page.images) == 6 and page.tables >= 6 and page.captions == page.tables
    positions = next(label for label in page.images if label.startswith("Conditional acceptance"))
    assert "1 67, 2 100, 3 50" in positions


def test_runs_are_compared_and_each_verdict_is_shown(record: RunRecord) -> None:
    worse = replace(
        record,
        lossless=LosslessReport(7, 1, 0, (Difference("q2", 0, 4, 17, None, "mismatch"),)),
        failures=(),
    )
    seen = Page(render_html([record, worse])).seen
    assert "Runs side by side" in seen and "1 of 7" in seen and "0 of 7" in seen
    assert "1 of 7 requests gave other output: not lossless." in seen and any("(2)" in text for text in seen)
    assert "Do not ship." in seen, "one deployment: what one of its runs shows holds for it"
    assert "q2, turn 1" in seen


def test_a_run_without_baseline_or_drafts_still_has_a_report(
    prompts: tuple[Prompt, ...], tmp_path: Path
) -> None:
    asked = EvalRequest(
        "plain", FakeTarget(), None, PromptSet("here", prompts, ()), prompts, RunSettings(output_length=1)
    )
    record = evaluate(asked, tmp_path, silent)
    seen = Page(render_html([record])).seen
    assert "Nothing was drafted." in seen
    assert any("no baseline was measured" in text for text in seen)
    assert "plain" in render_terminal([record])
    with pytest.raises(ValueError, match="at least one"):
        render_html([])


def test_the_page_is_the_same_every_time(record: RunRecord) -> None:
    assert render_html([record]) == render_html([record])


def test_the_terminal_shows_the_same_numbers(record: RunRecord) -> None:
    text = render_terminal([record], width=100)
    assert "2.67" in text and "55.6" in text and "67\u202f% 100\u202f% 50\u202f%" in text
    assert "All 7 compared requests" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b[" not in text and "\x1b[" in render_terminal([record], width=100, colour=True)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 0.00013), (0, 1), (0.74, 1.9), (0, 137.2), (1, 1), (0, 98_765)]
)
def test_ticks_are_round_and_span_the_data(low: float, high: float) -> None:
    marks = ticks(low, high)
    assert marks[0] <= low and marks[-1] >= high and 2 <= len(marks) <= 9
    assert all(b > a for a, b in itertools.pairwise(marks))


def test_charts_keep_inside_their_frame_and_skip_what_is_missing() -> None:
    labels = [f"category {i}" for i in range(40)]
    values = [None if i % 3 == 0 else 0.4 + i / 10 for i in range(40)]
    both = [Series("a", values), Series("b", values[::-1])]
    for text in (
        bars("t", labels, both, spell=str, x_title="x"),
        rows("t", labels, both, spell=str, x_title="x", origin=1.0),
        rows("t", ["one"], [Series("a", [None])], spell=str, x_title="x"),
        bars("t", [], [Series("a", [])], spell=str, x_title="x"),
        curves("t", [Curve("a", cumulative([1.0, 2.0])), Curve("b", [])], x_title="x", description="d"),
        curves("t", [], x_title="x", description="d"),
    ):
        width, height = map(float, re.search(r'viewBox="0 0 (\d+) (\d+)"', text).groups())
        for x, y, w, h in re.findall(
            r'<rect class="s\d" x="([-\d.]+)" y="([-\d.]+)" width="([\d.]+)" height="([\d.]+)"', text
        ):
            assert float(x) >= 0 and float(x) + float(w) <= width + 0.5
            assert float(y) >= 0 and float(y) + float(h) <= height + 0.5
    assert bars("t", labels, both, spell=str, x_title="x").count("<rect") == 2 * sum(
        v is not None for v in values
    )


def test_a_cumulative_curve_keeps_its_ends_when_thinned() -> None:
    points = cumulative([float(i) for i in range(5000, 0, -1)])
    assert len(points) <= 401 and points[0] == (1.0, 0.0) and points[-1] == (5000.0, 1.0)
    assert next(x for x, share in points if share >= 0.5) == pytest.approx(2500, abs=30)
    assert cumulative([]) == []


def test_headings_are_not_skipped_and_the_page_has_one_main_part(record: RunRecord) -> None:
    """A screen reader's user moves by them."""
    text = render_html([record, replace(record, name="other")])
    levels = [int(level) for level in re.findall(r"<h(\d)", text)]
    assert levels[0] == 1 and levels.count(1) == 1 and text.count("<main>") == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


@pytest.mark.parametrize("theme", ["light", "dark", "print"])
def test_text_stands_out_from_its_ground(theme: str) -> None:
    """At least 4.5 : 1, as WCAG 2.2 asks of text (1.4.3)."""
    light, dark, printed = (
        dict(re.findall(r"--(\w+):(#\w+)", rules)) for rules in re.findall(r":root{(.*?)}", STYLE, re.S)
    )
    colours = {"light": light, "dark": light | dark, "print": light | printed}[theme]

    def luminance(name: str) -> float:
        digits = colours[name].removeprefix("#")
        digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for text in ("ink", "soft", "good", "bad", "warn"):
        for ground in ("bg", "card"):
            dim, bright = sorted((luminance(text), luminance(ground)))
            assert (bright + 0.05) / (dim + 0.05) >= 4.5, (theme, text, ground)


def chromium(place: Path, page: str, *flags: str) -> str:
    """Opens a page, given as HTML, and gives what the browser printed; anything a page complains of fails the test."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip(f"no browser here: none of {', '.join(names)} is on the path")
    (place / "page.html").write_text(page, encoding="utf-8")
    quiet = ("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync", "--hide-scrollbars")
    quiet += ("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr")
    command = [browser, "--headless", "--no-sandbox", *quiet, f"--user-data-dir={place / 'profile'}", *flags]
    done = subprocess.run(
        [*command, (place / "page.html").as_uri()], capture_output=True, text=True, timeout=60
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def in_frame(page: str, width: int, height: int = 3000) -> str:
    """A window is never narrower than 500 pixels, a frame is. Once it is there, its body says how wide the page got."""
    return (
        f'<body style="margin:0"><iframe srcdoc="{escape(page)}" '
        f'style="width:{width}px;height:{height}px;border:0" '
        'onload="document.body.dataset.wide=this.contentDocument.documentElement.scrollWidth"></iframe>'
    )


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("kind", ["one run", "sweep"])
def test_a_browser_shows_the_page_without_complaint(
    record: RunRecord, tmp_path: Path, width: int, kind: str
) -> None:
    loads = [replace(record, settings=replace(record.settings, concurrency=c)) for c in (1, 2, 4, 8)]
    page = render_html(
        [record] if kind == "one run" else [*loads, *(replace(r, name="other") for r in loads)]
    )
    shot = tmp_path / "page.png"
    chromium(tmp_path, in_frame(page, width), f"--window-size={max(width, 500)},3000", f"--screenshot={shot}")
    assert shot.stat().st_size > 20_000
    found = chromium(tmp_path, in_frame(page, width), "--dump-dom")
    assert f'data-wide="{width}"' in found, (
        "nothing sticks out of the page: what is too wide scrolls in itself"
    )


def test_the_page_prints(record: RunRecord, tmp_path: Path) -> None:
    pdf = tmp_path / "page.pdf"
    chromium(tmp_path, render_html([record, record]), f"--print-to-pdf={pdf}", "--no-pdf-header-footer")
    assert pdf.read_bytes().startswith(b"%PDF") and pdf.stat().st_size > 20_000
