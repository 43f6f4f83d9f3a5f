"""A page as text: in order, escaped, one file that asks for nothing, with a script only where there is a chart."""

import html.parser
import json
import re

import pytest

from wideflat.report.chart import Chart, Series
from wideflat.report.page import Page


@pytest.fixture
def page():
    return Page("All <of> it", "made by a test")


class Outline(html.parser.HTMLParser):
    """The headings of a page, and elements that are open at its end."""

    def __init__(self, text):
        super().__init__()
        self.open, self.headings = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "link", "br", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)


def test_everything_stands_in_order_is_closed_and_listed(page):
    page.section("One & two")
    page.paragraph("of <it>")
    page.section("Three")
    page.picture("Mine <1>", '<svg viewBox="0 0 1 1"><path d="M0 0"/></svg>', "by hand")
    page.code("x < y")
    text = page.html()
    outline = Outline(text)
    assert outline.headings == ["All <of> it", "One & two", "Three", "Mine <1>"] and outline.open == []
    assert re.findall(r'<li><a href="#[^"]+">([^<]+)</a>', text) == ["One &amp; two", "Three"]
    assert "of &lt;it&gt;" in text and "x &lt; y" in text and '<path d="M0 0"/>' in text


def test_the_finding_comes_first(page):
    page.finding = "a < b"
    assert Outline(page.html()).headings[0] == "a < b" and "All &lt;of&gt; it</p>" in page.html()


def test_only_a_chart_brings_a_script_and_nothing_is_asked_for(page):
    bare = page.html()
    page.charts(Chart("c", "t", "x", "y", [Series("</script>", [0, 1], [1, 2])]))
    drawn = page.html()
    assert 'id="plotly"' not in bare and len(bare) < 1e5 < len(drawn)
    for text in (bare, drawn):
        assert "default-src 'none'" in text and not re.search(r'(src|href)="(https?:)?//', text)
    assert drawn.count("</script>") == drawn.count("<script")  # none of a label


def test_numbers_are_told_from_words_and_details_are_json(page):
    page.table(["run", "error %"], [["<b>", "1.5 ± 0.1"], ["sgd", "–"]])
    page.details("Configuration", {"seed": 0, "name": "<net>"})
    text = page.html()
    assert '<th scope="col">run' in text and re.search(r'<th scope="col" class="\w+">error %', text)
    (shown,) = re.findall(r'<details><summary>Configuration</summary><pre tabindex="0">(.*?)</pre>', text, re.DOTALL)
    assert json.loads(html.unescape(shown)) == {"seed": 0, "name": "<net>"}


def test_a_page_is_written_whole(page, tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    page.write(path)
    before = path.read_text()
    monkeypatch.setattr(page, "html", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        page.write(path)
    assert path.read_text() == before == Page("All <of> it", "made by a test").html()
