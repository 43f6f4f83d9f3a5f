"""The report in a real browser: nothing fails, nothing is fetched, figures are drawn, toggles and downloads work."""

import csv
import io
import shutil
from pathlib import Path

import pytest

from wideflat.report.chart import Chart, Series
from wideflat.report.page import Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]

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


@pytest.fixture
def report(tmp_path):
    page = Page("Flatness of <script>alert(1)</script>", "made by a test")
    page.section("Figures & tables")
    page.table(["run", "error"], [["<img src=x onerror=alert(2)>", "1.5"]])
    sigmas = [0.0, 0.25, 0.5]
    page.charts(
        Chart(
            "profile",
            "Local energy",
            "sigma",
            "dE",
            [Series("SGD", sigmas, [0, 0.1, 0.4], error=[0, 0.01, 0.02]), Series("</script>", sigmas, [0, 0.05, 0.2])],
        ),
        Chart("errors", "Test error", "", "error", [Series("SGD", [], [0.1, 0.2, 0.15])], kind="distribution"),
        Chart("empty", "Nothing", "x", "y"),
    )
    path = tmp_path / "report.html"
    page.write(path)
    return path


@pytest.fixture
def opened(browser, report):
    """The page, with everything that went wrong or went out collected."""
    page = browser.new_page(accept_downloads=True)
    trouble, requests = [], []
    page.on("console", lambda message: trouble.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("dialog", lambda dialog: (trouble.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report.as_uri())
    page.wait_for_selector('figure[data-ready="true"]')
    yield page
    page.close()
    assert trouble == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_figures_are_drawn(opened):
    assert opened.locator("figure[data-name] svg").count() == 2
    for index in range(2):
        box = opened.locator("figure[data-name] svg").nth(index).bounding_box()
        assert box["width"] > 200 and box["height"] > 100
    line = opened.locator('[id="profile-series-0-line"] path').first.bounding_box()
    assert line["width"] > 100 and line["height"] > 20
    assert opened.get_by_text("Nothing to draw yet.").count() == 1


def test_series_toggle_with_mouse_and_keyboard(opened):
    button = opened.locator('figure[data-name="profile"] button[data-series="0"]')
    line = opened.locator('[id="profile-series-0-line"]')
    assert line.is_visible()
    button.click()
    assert not line.is_visible() and button.get_attribute("aria-pressed") == "false"
    assert opened.locator('[id="profile-series-1-line"]').is_visible()
    button.press("Enter")
    assert line.is_visible() and button.get_attribute("aria-pressed") == "true"


def test_zoom_with_buttons_and_keys(opened):
    figure = opened.locator('figure[data-name="profile"]')
    view = lambda: [float(x) for x in figure.locator("svg").get_attribute("viewBox").split()]  # noqa: E731
    home = view()
    figure.locator('button[data-action="in"]').click()
    assert view()[2] == pytest.approx(0.7 * home[2])
    figure.locator(".plot").press("ArrowRight")
    assert view()[0] > home[0] + 0.15 * home[2]
    figure.locator(".plot").press("0")
    assert view() == home


@pytest.mark.parametrize(("ending", "start"), [("svg", b"<svg"), ("png", b"\x89PNG"), ("csv", b"series,x,y")])
def test_downloads(opened, ending, start):
    with opened.expect_download() as waiting:
        opened.locator(f'figure[data-name="profile"] button[data-action="{ending}"]').click()
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
        assert image.width == 1600 and image.getextrema()[0] < 120  # something dark has been drawn


def test_phone_width_does_not_scroll_sideways(opened):
    opened.set_viewport_size({"width": 375, "height": 800})
    assert opened.evaluate("document.documentElement.scrollWidth") <= 375


def test_dark_and_light_follow_the_reader(opened):
    color = lambda: opened.evaluate("getComputedStyle(document.body).backgroundColor")  # noqa: E731
    opened.emulate_media(color_scheme="light")
    light = color()
    opened.emulate_media(color_scheme="dark")
    assert light == "rgb(255, 255, 255)" and color() == "rgb(21, 23, 26)"


def test_readable_without_scripts(browser, report):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    assert page.locator("figure svg").first.is_visible()
    assert not page.locator(".tools").first.is_visible()
    context.close()
