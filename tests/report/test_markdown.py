"""Escaping of Markdown, checked with a renderer."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from lockstep.report import markdown

RENDERER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
HOSTILE = st.text(st.sampled_from("<>&\\`*_[]()|~$!#\n\r\x1b\t -+=ab1.:/\"'"), max_size=40)


def shown(source: str) -> str:
    """Return the text that a reader sees in rendered Markdown; fail on any tag but a paragraph."""
    page = RENDERER.render(source)
    assert re.fullmatch(r"<p>[^<]*</p>\n", page), page
    for entity, sign in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&")):
        page = page.replace(entity, sign)
    return page[3:-5]


@given(HOSTILE)
def test_text_is_displayed_unchanged(text):
    expected = text.replace("\n", " ").replace("\r", "\\r").replace("\x1b", "\\x1b").strip()
    assert shown(f"x {markdown.escape_markdown(text)} x") == f"x {expected} x"


@given(HOSTILE)
def test_a_fenced_block_displays_its_text_and_ends(text):
    *lines, after = RENDERER.render(
        "\n".join([*markdown.fenced_block(text), "", "after"])
    ).splitlines()
    assert after == "<p>after</p>"
    page = "\n".join(lines)
    assert page.startswith("<pre><code>")
    assert page.endswith("</code></pre>")
    assert "<" not in page[11:-13]


@given(st.lists(st.lists(HOSTILE, min_size=3, max_size=3), min_size=1, max_size=4))
def test_a_table_has_the_given_cells(rows):
    page = RENDERER.render("\n".join(markdown.markdown_table(["a", "b", "c"], rows)))
    assert page.count("<td>") == 3 * len(rows)
    assert set(re.findall(r"</?(\w+)", page)) == {"table", "thead", "tbody", "tr", "th", "td"}


@pytest.mark.parametrize("text", ["held_out", "2 ranks, 8 micro-batches", "1.55 s (12.3%)"])
def test_plain_text_stays_readable(text):
    assert markdown.escape_markdown(text) == text
