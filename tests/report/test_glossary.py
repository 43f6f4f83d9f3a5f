from wideflat.report.glossary import WORDS, explained
from wideflat.report.page import Page


def test_words_inside_other_words_are_left_alone():
    met = set()
    assert explained("drawing a redraw, unsolved centers/d/Dx", met) == "drawing a redraw, unsolved centers/d/Dx"
    assert met == set()


def test_every_word_is_found_in_a_sentence_of_its_own():
    for word in WORDS:
        met = set()
        assert f">{word}</span>" in explained(f"What is {word} here?", met)
        assert met == {word}


def test_a_page_lists_the_words_it_used_and_no_others():
    page = Page("t")
    page.paragraph("With polish and without: d/D and the replicas.")
    text = page.html()
    assert "<dt>replicas</dt>" in text and "<dt>d/D</dt>" in text and "<dt>balanced</dt>" not in text
