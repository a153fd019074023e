"""A record that tries to inject markup and control characters, in every output format."""

import html.parser
import json
import re

import pytest
from click.testing import CliRunner

import records
from lockstep.cli import cli

HARM = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'><svg onload=alert(3)>"
    "|`[a](javascript:alert(4))`\n\n# heading\n```\n</details>"
    " https://evil.example www.evil.example <http://evil.example> ![x](https://evil.example/x.png)"
    "\r\x1b[2J\x1b]0;x\x07\x9b31m\u202e\x00"
)
FORMS = {
    "html": ["report", "night", "-o", "-"],
    "compare text": ["compare", "night", "plain"],
    "compare json": ["compare", "night", "plain", "--json"],
    "runs": ["runs"],
    "runs json": ["runs", "--json"],
}


def hostile():
    """Return the lines of a run whose every text, and every name that it may choose, does harm."""
    header = {
        "name": HARM, "command": [HARM, HARM], "recipe": HARM, "started": HARM,
        "layout": {"world_size": 2, "replicas": HARM, "backend": HARM, "device": HARM, HARM: HARM},
        "options": {HARM: HARM, "list": [HARM, [HARM]], "nested": {HARM: {HARM: HARM}}},
        "environment": {"hostname": HARM, "variables": {HARM: HARM}, "gpus": [HARM], HARM: HARM},
        "model": {"class": HARM, "parameters": 1}, "epochs": 2, "sources": HARM,
    }  # fmt: skip
    metrics = {HARM: 0.5, "accuracy": 0.5}
    for line in records.whole(**header):
        yield line | ({"metrics": metrics} if line["kind"] in ("step", "epoch") else {})
        if line["kind"] == "epoch":
            yield line | {"evaluation": {"loss": 0.5, "metrics": metrics}}
    histograms = HARM, {"counts": [HARM], "low": 0, "high": HARM}
    images = HARM, f"iVBORw0KGgo{HARM}"
    values = [{"value": 1.0}, *({"histogram": one} for one in histograms)]
    for value in [*values, *({"image": one} for one in images)]:
        yield {"kind": "log", "t": 1, "step": 3, "name": HARM + str(value.keys()), **value}
    yield {"kind": "log", "t": 1, "step": HARM, "value": HARM}
    yield {"kind": "warning", "t": 1, "rank": HARM, "message": HARM}
    layout = {"replicas": HARM, "stages": 2, "backend": HARM}
    yield records.checkpoint(5, path=HARM, bytes=HARM, digest=HARM)
    yield records.resume(7, layout=layout, resumed=HARM, differences=[HARM, {HARM: [HARM]}])
    yield from map(records.step, range(7, 20))
    lost = [{"member": HARM, "signal": HARM}, {"member": 1, "signal": 9}]
    yield records.new_round(1, 20, lost=lost, joined=[HARM], left=HARM, noticed=HARM)
    yield records.END | {"state": "failed", "message": HARM, "digest": HARM, "metrics": metrics}


@pytest.fixture(params=FORMS)
def shown(request, tmp_path, monkeypatch):
    """Return (the form, what is shown in it)."""
    monkeypatch.chdir(tmp_path)
    records.write(tmp_path / "runs" / "night", hostile())
    records.write(tmp_path / "runs" / "plain", records.whole())
    records.write(tmp_path / "runs" / f"a\x1b[2J{chr(0xDCFF)}b", records.whole(name=None))
    done = CliRunner().invoke(cli, FORMS[request.param], catch_exceptions=False)
    assert done.exit_code == 0
    return request.param, done


def test_control_characters_are_escaped(shown):
    _, done = shown
    assert re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", done.output) == []


class Tags(html.parser.HTMLParser):
    """Collects the tags of a page, and attributes that run something."""

    def __init__(self):
        super().__init__()
        self.names = set()
        self.running = []

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.running += [name for name, value in attrs if name.startswith("on")]
        self.running += [
            value
            for name, value in attrs
            if name in ("href", "src", "style") and "alert" in (value or "")
        ]


def test_text_does_not_become_tags_or_links(shown):
    form, done = shown
    page = done.output
    if form == "html":
        tags = Tags()
        tags.feed(page)
        assert not tags.names & {"img", "iframe", "a", "object"}
        assert tags.running == []
        assert "script" not in tags.names


def test_every_format_is_well_formed(shown):
    form, done = shown
    if form.endswith("json"):
        json.loads(done.stdout)
    if form in ("runs", "compare text"):
        assert "alert" in done.output
        assert "heading\n" not in done.output
