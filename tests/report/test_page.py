"""The pages in a real browser: hover, scales, keyboard, dark, phone; no error, no request."""

import numpy as np
import pytest

import browser
import records
from lockstep.formatting import format_number
from lockstep.record.reader import read_run
from lockstep.report.axes import Axis
from lockstep.report.chart import Chart, Curve, Series
from lockstep.report.comparison import compare_runs, comparison_html
from lockstep.report.page import draw_panel
from lockstep.report.run_report import report_html

pytestmark = pytest.mark.timeout(120)
needs_chromium = pytest.mark.skipif(
    browser.find() is None, reason="no Chromium here: install the package chromium to run this"
)
TIP = "document.querySelector('#chart-{} .tip')"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return a folder with a report, a report of many steps, and a comparison."""
    folder = tmp_path_factory.mktemp("pages")
    short = read_run(records.write(folder / "short", records.whole()))
    many = [records.step(n, per_epoch=1000, loss=1.0, seconds=0.01) for n in range(4000)]
    many[1234]["loss"] = 9.0
    long = read_run(records.write(folder / "long", [records.HEADER, *many, records.END]))
    (folder / "report.html").write_text(report_html(short))
    (folder / "long.html").write_text(report_html(long))
    (folder / "compare.html").write_text(comparison_html(compare_runs([short, long])))
    return folder


@pytest.fixture(scope="module")
def chromium():
    opened = browser.Browser()
    yield opened
    opened.close()


@pytest.fixture
def page(chromium):
    """Return an empty page, as on a desk and in daylight."""
    chromium.resize(1200, 900)
    chromium.darken(False)
    chromium.errors.clear()
    chromium.requests.clear()
    return chromium


@needs_chromium
def test_hover_shows_a_points_values(page, pages):
    page.open(pages / "report.html")
    assert page.evaluate(f"{TIP.format('loss')}.hidden")
    page.move("#chart-loss .plot", 9 / 19)
    shown = page.evaluate(f"{TIP.format('loss')}.innerText")
    assert shown.split("\n") == ["step 9", "training 0.6493", "held out 0.3000"]
    page.move("#chart-seconds .plot", 13 / 19)
    assert "a step 100 ms" in page.evaluate(f"{TIP.format('seconds')}.innerText")
    page.move("h1", 0.5)
    assert page.evaluate(f"{TIP.format('loss')}.hidden")
    assert page.errors == []


@needs_chromium
def test_hover_over_many_steps_shows_their_span_and_its_peak(page, pages):
    page.open(pages / "long.html")
    page.move("#chart-loss .plot", 1234 / 3999)
    shown = page.evaluate(f"{TIP.format('loss')}.innerText")
    assert shown.startswith("steps 1,230 to 1,239")
    assert "(1.000 to 9.000)" in shown
    drawn = "document.querySelector('#chart-loss .on-linear .band').getBBox().height"
    assert page.evaluate(drawn) > 700  # of 1000: the peak stands out of the mean


@needs_chromium
def test_the_log_scale_toggles(page, pages):
    page.open(pages / "report.html")
    shown = "getComputedStyle(document.querySelector('#chart-loss .plot g.on-{}')).display"
    for expected in (("inline", "none"), ("none", "inline"), ("inline", "none")):
        assert tuple(page.evaluate(shown.format(n)) for n in ("linear", "log")) == expected
        page.click("#chart-loss .scale")
    assert page.evaluate("document.querySelector('#chart-metric-accuracy .scale')") is None
    assert page.errors == []


@needs_chromium
def test_the_arrow_keys_read_out_values(page, pages):
    page.open(pages / "report.html")
    page.evaluate("document.querySelector('#chart-loss .plot').focus()")
    for _ in range(3):
        page.press("ArrowRight")
    assert page.evaluate(f"{TIP.format('loss')}.innerText").startswith("step 2")
    page.press("Escape")
    assert page.evaluate(f"{TIP.format('loss')}.hidden")


@needs_chromium
@pytest.mark.parametrize("name", ["report", "long", "compare"])
def test_a_phone_sees_everything_without_scrolling_sideways(page, pages, name):
    page.resize(360, 740)
    page.open(pages / f"{name}.html")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    sizes = "[...document.querySelectorAll('main *')].map(e => getComputedStyle(e).fontSize)"
    assert min(float(size.removesuffix("px")) for size in page.evaluate(sizes)) >= 11
    page.move("#chart-loss .plot", 0.98)
    box = page.evaluate(f"{TIP.format('loss')}.getBoundingClientRect().toJSON()")
    assert box["left"] >= 0
    assert box["right"] <= 360
    assert page.errors == []


@needs_chromium
def test_a_page_asks_for_nothing_but_itself(page, pages):
    for name in ("report", "compare"):
        page.open(pages / f"{name}.html")
    assert [url for url in page.requests if not url.startswith("data:")] == [
        (pages / f"{name}.html").as_uri() for name in ("report", "compare")
    ]
    assert page.errors == []


@needs_chromium
def test_light_and_dark_follow_the_reader(page, pages):
    page.open(pages / "report.html")
    grounds = {}
    for dark in (False, True):
        page.darken(dark)
        grounds[dark] = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert grounds == {False: "rgb(255, 255, 255)", True: "rgb(16, 21, 28)"}


@needs_chromium
def test_the_comparison_shows_each_run_at_a_step(page, pages):
    page.open(pages / "compare.html")
    page.move("#chart-loss .plot", 0.0)
    assert page.evaluate(f"{TIP.format('loss')}.innerText").count("\n") == 2
    page.move("#chart-loss .plot", 0.5)  # only one of them is as long
    assert page.evaluate(f"{TIP.format('loss')}.innerText").count("\n") == 1


def paths(low, mean, high, role="line"):
    """Return the paths, by kind, of a curve whose points are evenly spaced over a unit axis."""
    x = np.linspace(0.0, 1.0, len(mean))
    last = x + 1e-9 if low is not mean else x  # a bucket of several values has a band
    curve = Curve(x, last, *(np.array(values) for values in (low, mean, high)))
    unit = Axis(0.0, 1.0)
    chart = Chart("loss", "Loss", (Series("a", curve, role),), unit, unit, None, format_number)
    (scale,) = draw_panel(chart).scales
    return {stroke.kind: stroke.path for stroke in scale.strokes}


def test_a_line_is_interrupted_at_missing_values():
    y = [0.0, 1.0, np.nan, 1.0, 1.0]
    assert paths(y, y, y) == {"line": "M0 1000l1000-1000M3000 0l1000 0"}
    missing = [np.nan] * 5
    assert paths(missing, missing, missing) == {}


def test_a_band_goes_along_the_maximum_and_back_along_the_minimum():
    found = paths([0.0, 0.5], [0.5, 0.75], [1.0, 1.0])
    assert found["band"] == "M0 0l4000 0 0 500-4000 500z"


def test_dots_are_strokes_of_length_zero():
    y = [0.0, 1.0]
    assert paths(y, y, y, role="dots") == {"dots": "M0 1000h0M4000 0h0"}
