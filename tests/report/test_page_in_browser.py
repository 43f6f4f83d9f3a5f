"""The report in a real browser: it hovers, zooms, rescales, prints, obeys the keyboard, and asks for nothing."""

import csv
import io
import shutil
from pathlib import Path

import pytest

from wideflat.report.chart import Chart, Series
from wideflat.report.page import Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
AXE = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"
SIGMAS = [0.0, 0.25, 0.5]

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; on Debian: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    page = Page("Flatness of <script>alert(1)</script>", "made by a test", finding="eSGD is <flatter> than SGD.")
    page.section("Figures & tables")
    page.table(["run", "balanced %"], [["<img src=x onerror=alert(2)>", "1.5"]], caption="Test errors")
    page.charts(
        Chart(
            "profile",
            "Local energy",
            "sigma",
            "dE (points)",
            [
                Series("SGD", SIGMAS, [0, 10, 40], error=[0, 1, 2], n=3),
                Series("</script>", SIGMAS, [0, 1, 2], error=[0, 0.5, 0.5]),
            ],
            caption="Lower is flatter.",
        ),
        Chart("errors", "Test error", "", "error", [Series("SGD", [], [0.1, 0.2, 0.15])], kind="distribution"),
        Chart("rates", "Learning rate", "epoch", "η", [Series("SGD", [0, 1, 2], [0.1, 0.1, 0.01])], kind="step"),
        Chart("empty", "Nothing", "x", "y"),
    )
    page.section("Where it comes from")
    page.details("Configuration", {"seed": 0})
    path = tmp_path_factory.mktemp("report") / "report.html"
    page.write(path)
    return path


@pytest.fixture(scope="module")
def loaded(browser, report):
    """The page, with everything that went wrong or went out collected."""
    page = browser.new_page(accept_downloads=True, viewport={"width": 1400, "height": 900})
    trouble, requests = [], []
    page.on("console", lambda message: trouble.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("dialog", lambda dialog: (trouble.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report.as_uri())
    page.wait_for_selector('html[data-ready="true"]')
    yield page, trouble, requests
    page.close()


@pytest.fixture
def opened(loaded):
    """The page as it is after loading; nothing has failed and nothing has been asked for when the test is over."""
    page, trouble, requests = loaded
    page.emulate_media(color_scheme="light", media="screen")
    page.set_viewport_size({"width": 1400, "height": 900})
    page.mouse.move(0, 0)
    page.evaluate("""async () => {
        const changed = '.legend button[aria-pressed=false], .tools [aria-pressed=true]';
        for (const button of document.querySelectorAll(changed)) button.click();
        for (const button of document.querySelectorAll('[data-action=reset]')) button.click();
        await new Promise((done) => setTimeout(done, 100));
    }""")
    yield page
    assert trouble == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []


def axis(page, name, which="yaxis"):
    """The ends of an axis as it is drawn now."""
    return page.evaluate(f"document.querySelector('#{name} .live')._fullLayout.{which}.range.slice()")


def test_the_finding_is_the_first_line_and_the_file_is_small(opened, report):
    assert opened.locator("header").inner_text().startswith("eSGD is <flatter> than SGD.")
    assert opened.locator("h1").inner_text() == "eSGD is <flatter> than SGD."
    assert report.stat().st_size < 6e6


def test_figures_are_drawn(opened):
    assert opened.locator("figure[data-ready]").count() == 3
    for name in ("profile", "errors", "rates"):
        box = opened.locator(f"#{name} .live .plot-container").bounding_box()
        assert box["width"] > 200 and box["height"] > 100
        assert not opened.locator(f"#{name} .still").is_visible()
    line = opened.locator("#profile .scatterlayer .js-line").nth(1).bounding_box()
    assert line["width"] > 100 and line["height"] > 20
    assert opened.get_by_text("Nothing to draw yet.").count() == 1


def test_plots_beside_each_other_are_in_line(opened):
    tops = [opened.locator(f"#{name} .plot").bounding_box()["y"] for name in ("profile", "errors")]
    assert tops[0] == pytest.approx(tops[1], abs=1)


def test_hover_says_value_error_and_n(opened):
    box = opened.locator("#profile .live .nsewdrag").bounding_box()
    opened.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    opened.wait_for_selector("#profile .hoverlayer .legend")
    text = opened.locator("#profile .hoverlayer").text_content()
    assert "10 ± 1 (n = 3)" in text and "1 ± 0.5" in text and "</script>" in text


def test_a_series_that_goes_lets_the_axis_rescale(opened):
    button = opened.locator('#profile button[data-series="0"]')
    assert axis(opened, "profile")[1] > 40
    button.click()
    opened.wait_for_function("document.querySelector('#profile .live')._fullLayout.yaxis.range[1] < 5")
    assert button.get_attribute("aria-pressed") == "false"
    button.press("Enter")
    opened.wait_for_function("document.querySelector('#profile .live')._fullLayout.yaxis.range[1] > 40")
    assert button.get_attribute("aria-pressed") == "true"


def test_zoom_zooms_the_axes(opened):
    low, high = axis(opened, "profile", "xaxis")
    opened.locator('#profile button[data-action="in"]').click()
    opened.wait_for_function(f"document.querySelector('#profile .live')._fullLayout.xaxis.range[1] < {high - 1e-6}")
    inner = axis(opened, "profile", "xaxis")
    assert inner[1] - inner[0] == pytest.approx(0.7 * (high - low))
    assert opened.locator("#profile .xaxislayer-above .xtick").count() >= 3  # axis and ticks are still there
    opened.locator("#profile .plot").press("ArrowRight")
    moved = axis(opened, "profile", "xaxis")
    assert moved[0] == pytest.approx(inner[0] + 0.1 * (inner[1] - inner[0]))
    opened.locator("#profile .plot").press("0")
    opened.wait_for_timeout(50)
    assert axis(opened, "profile", "xaxis") == pytest.approx([low, high])


def test_logarithmic_axis(opened):
    button = opened.locator('#profile button[data-action="log"]')
    button.click()
    opened.wait_for_function("document.querySelector('#profile .live')._fullLayout.yaxis.type === 'log'")
    opened.wait_for_timeout(50)
    low, high = axis(opened, "profile")
    assert button.get_attribute("aria-pressed") == "true" and -2 < low < 0 and 1.5 < high < 2  # of 0.5 to 42


def test_learning_rates_are_steps(opened):
    path = opened.locator("#rates .scatterlayer .js-line").get_attribute("d")
    assert "H" in path and "V" in path and "L" not in path


@pytest.mark.parametrize(("ending", "start"), [("svg", b"<svg"), ("png", b"\x89PNG"), ("csv", b"series,x,y")])
def test_downloads(opened, ending, start):
    with opened.expect_download() as waiting:
        opened.locator(f'#profile button[data-action="{ending}"]').click()
    download = waiting.value
    assert download.suggested_filename == f"profile.{ending}"
    content = Path(download.path()).read_bytes()
    assert content.startswith(start)
    if ending == "csv":
        rows = list(csv.DictReader(io.StringIO(content.decode())))
        assert [row["series"] for row in rows] == ["SGD"] * 3 + ["</script>"] * 3
    if ending == "png":
        from PIL import Image

        image = Image.open(io.BytesIO(content)).convert("L")
        assert image.width == 1600 and image.getextrema() == (pytest.approx(30, abs=30), 255)  # dark ink on white


@pytest.mark.parametrize("width", [375, 768, 1400, 2560])
def test_no_width_scrolls_sideways_or_is_too_small_to_read(opened, width):
    opened.set_viewport_size({"width": width, "height": 800})
    opened.wait_for_timeout(300)
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    tick = opened.locator("#profile .xtick text").first
    assert float(tick.evaluate("e => getComputedStyle(e).fontSize.replace('px', '')")) >= 12
    box = opened.locator("#profile .live").bounding_box()
    assert 250 <= box["width"] <= 900 and 250 <= box["height"] <= 450


def test_dark_and_light_follow_the_reader(opened):
    color = lambda: opened.evaluate("getComputedStyle(document.body).backgroundColor")  # noqa: E731
    ink = lambda: opened.locator("#profile .xtick text").first.evaluate("e => getComputedStyle(e).fill")  # noqa: E731
    opened.emulate_media(color_scheme="light")
    light = color(), ink()
    opened.emulate_media(color_scheme="dark")
    opened.wait_for_timeout(300)
    assert light == ("rgb(255, 255, 255)", "rgb(28, 30, 33)")
    assert (color(), ink()) == ("rgb(21, 23, 26)", "rgb(232, 234, 237)")


def test_on_paper_the_still_figure_is_dark_on_white(opened):
    opened.emulate_media(color_scheme="dark", media="print")
    assert opened.locator("#profile .still svg").is_visible() and not opened.locator("#profile .live").is_visible()
    assert not opened.locator("#profile .tools").is_visible()
    style = "e => getComputedStyle(e).color"
    assert opened.locator("#profile .still svg").evaluate(style) == "rgb(0, 0, 0)"


def test_words_of_the_paper_explain_themselves_to_pointer_and_keyboard(opened):
    term, tip = opened.locator("th .term"), opened.locator("#tip")
    term.hover()
    assert tip.is_visible() and "both classes counting the same" in tip.inner_text()
    opened.mouse.move(0, 0)
    assert not tip.is_visible()
    term.focus()
    assert tip.is_visible()
    term.press("Escape")
    assert not tip.is_visible()


@pytest.mark.skipif(not AXE.exists(), reason="no axe-core here; .ci/run installs it: npm install --no-save axe-core")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(opened, scheme):
    opened.emulate_media(color_scheme=scheme)
    opened.wait_for_timeout(300)
    opened.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    opened.evaluate(AXE.read_text(encoding="utf-8"))
    found = opened.evaluate(
        "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21aa', 'wcag22aa', 'best-practice']})"
    )
    bad = [(rule["id"], [node["html"][:120] for node in rule["nodes"]][:3]) for rule in found["violations"]]
    assert bad == []
    assert any(rule["id"] == "color-contrast" for rule in found["passes"])


def test_readable_without_scripts(browser, report):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    assert page.locator("figure svg").first.is_visible()
    assert not page.locator(".tools").first.is_visible()
    context.close()
