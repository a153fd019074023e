"""Escaping of Markdown, checked with a renderer."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from lockstep.tools.report import markdown

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
def test_a_line_of_text_alone_is_one_paragraph(text):
    """No heading, list, quotation, rule or code."""
    escaped = markdown.escape_markdown(text)
    assert not escaped or shown(escaped)
    assert RENDERER.render(f"x\n{escaped}").count("<p>") == 1


@pytest.mark.parametrize(
    "text",
    [
        "https://evil.example/x", "HTTP://evil.example", "ftp://evil.example", "www.evil.example",
        "<https://evil.example>", "[x](https://evil.example)", "![x](//evil.example/x.png)",
        "[x]: https://evil.example", "[x](javascript:alert(1))", "# x", "1. x", "2) x", "- x",
        "+ x", "> x", "---", "===", ":-", "    x", "\tx", "~~~", "***", "<!-- x", "&lt;img&gt;",
    ],
)  # fmt: skip
def test_no_text_is_a_link_or_a_block(text):
    """Addresses stay text also where a renderer makes links of them, as GitHub does."""
    escaped = markdown.escape_markdown(text)
    assert shown(escaped) == text.strip()
    assert re.search(r"://|www\.", escaped, re.IGNORECASE) is None


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
