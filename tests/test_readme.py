"""The README does what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_quickstart_runs_alone_and_on_two_ranks_with_one_digest(tmp_path):
    (tmp_path / "train.py").write_text(blocks("README.md")[0])
    digests = set()
    for way in ([], ["-m", "lockstep", "run", "-n", "2"]):
        outcome = subprocess.run(
            [sys.executable, *way, "train.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert outcome.returncode == 0, outcome.stderr
        digests.add(re.findall(r"[0-9a-f]{64}", outcome.stdout)[0])
    assert len(digests) == 1


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)", text):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), target
