"""Pages in a real browser: dark mode, phones; no errors, no requests."""

import os

import pytest
from playwright.sync_api import sync_playwright

import records
from dev.pictures import find_browser
from lockstep.record.reader import read_run
from lockstep.tools.report.run_report import report_html

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return a folder with reports."""
    folder = tmp_path_factory.mktemp("pages")
    short = read_run(records.write(folder / "short", records.whole()))
    many = [records.step(n, per_epoch=1000, loss=1.0, seconds=0.01) for n in range(4000)]
    many[1234]["loss"] = 9.0
    long = read_run(records.write(folder / "long", [records.HEADER, *many, records.END]))
    resumed = read_run(records.write(folder / "resumed", records.resumed()))
    elastic = read_run(records.write(folder / "elastic", records.elastic()))
    (folder / "elastic.html").write_text(report_html(elastic))
    (folder / "resumed.html").write_text(report_html(resumed))
    (folder / "report.html").write_text(report_html(short))
    (folder / "long.html").write_text(report_html(long))
    return folder


@pytest.fixture(scope="module")
def chromium():
    """Start the system's Chromium; skip where there is none, unless the tests require it."""
    program = find_browser()
    if program is None:
        reason = "no Chromium was found; install the package chromium to run this test"
        if os.environ.get("LOCKSTEP_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


class Reader:
    """A tab of the browser that collects the errors and requests of its pages."""

    def __init__(self, context, folder):
        self.page = context.new_page()
        self.folder = folder
        self.errors = []
        self.requests = []
        self.page.on("pageerror", lambda error: self.errors.append(error.message))
        self.page.on("console", self._collect)
        self.page.on("request", lambda request: self.requests.append(request.url))

    def _collect(self, message):
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def clear(self, size):
        """Leave the page, as if the tab were new."""
        self.page.goto("about:blank")
        self.page.set_viewport_size(size)
        self.page.emulate_media(color_scheme="light")
        self.errors.clear()
        self.requests.clear()

    def open(self, name):
        self.page.goto((self.folder / f"{name}.html").as_uri())


@pytest.fixture(scope="module")
def tabs(chromium, pages):
    """Return a tab of a desktop browser and one of a phone; a new one takes half a second."""
    contexts = [
        chromium.new_context(reduced_motion="reduce"),
        chromium.new_context(is_mobile=True),
    ]
    yield [Reader(context, pages) for context in contexts]
    for context in contexts:
        context.close()


@pytest.fixture
def reader(tabs):
    """Return a tab of a desktop browser in light mode."""
    tabs[0].clear({"width": 1200, "height": 900})
    return tabs[0]


@pytest.fixture
def phone(tabs):
    """Return a tab of a phone."""
    tabs[1].clear({"width": 360, "height": 740})
    return tabs[1]


@pytest.mark.parametrize("name", ["report", "long", "resumed", "elastic"])
def test_a_phone_shows_everything_without_horizontal_scrolling(phone, name):
    phone.open(name)
    assert phone.page.evaluate("document.documentElement.scrollWidth") <= 360
    sizes = "[...document.querySelectorAll('main *')].map(e => getComputedStyle(e).fontSize)"
    assert min(float(size.removesuffix("px")) for size in phone.page.evaluate(sizes)) >= 11
    assert phone.errors == []


def test_a_phone_shows_the_table_of_epochs_without_scrolling_it(phone):
    phone.open("report")
    table = phone.page.locator("#epochs")
    assert table.locator("th").count() == 7
    shown = [name.inner_text() for name in table.locator("th").all() if name.is_visible()]
    assert shown == ["epoch", "loss", "accuracy", "held-out loss", "held-out accuracy"]
    inner = "e => e.scrollWidth"
    outer = "e => e.parentElement.clientWidth"
    assert table.evaluate(inner) <= table.evaluate(outer)
    assert phone.page.locator(".turn").is_visible()
    phone.page.set_viewport_size({"width": 740, "height": 360})
    assert all(name.is_visible() for name in table.locator("th").all())
    assert not phone.page.locator(".turn").is_visible()


@pytest.mark.parametrize("name", ["report", "long"])
def test_a_phone_shows_charts_whole_and_legible(phone, name):
    """They were cut at the right edge."""
    phone.open(name)
    boxes = """[...document.querySelectorAll('.chart')].map(chart => {
        const [around, svg] = [chart, chart.querySelector('svg')].map(
            element => element.getBoundingClientRect());
        const labels = [...chart.querySelectorAll('text')];
        const places = labels.map(label => label.getBoundingClientRect());
        return {
            left: Math.min(...places.map(each => each.left)) - around.left,
            right: around.right - Math.max(svg.right, ...places.map(each => each.right)),
            text: svg.width / chart.querySelector('svg').viewBox.baseVal.width
                * parseFloat(getComputedStyle(labels[0]).fontSize),
        };
    })"""
    found = phone.page.evaluate(boxes)
    assert len(found) >= 3
    assert min(min(box["left"], box["right"]) for box in found) >= 0
    assert min(box["text"] for box in found) >= 10


def test_charts_have_the_size_and_colors_of_the_page(reader):
    reader.open("report")
    reader.page.emulate_media(color_scheme="dark")
    chart = reader.page.locator("#chart-loss svg")
    assert chart.bounding_box()["width"] > 400
    line = chart.locator("polyline").last
    assert line.evaluate("e => getComputedStyle(e).stroke") == "rgb(95, 176, 238)"
    assert reader.errors == []


def test_a_page_requests_nothing_but_itself(reader, pages):
    reader.open("report")
    requests = [url for url in reader.requests if not url.startswith("data:")]
    assert requests == [(pages / "report.html").as_uri()]
    assert reader.errors == []


def test_light_and_dark_follow_the_reader(reader):
    reader.open("report")
    backgrounds = {}
    for scheme in ("light", "dark"):
        reader.page.emulate_media(color_scheme=scheme)
        style = "getComputedStyle(document.body).backgroundColor"
        backgrounds[scheme] = reader.page.evaluate(style)
    assert backgrounds == {"light": "rgb(255, 255, 255)", "dark": "rgb(16, 21, 28)"}
