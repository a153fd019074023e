"""The members of a host save their state when they have lost the launcher of host 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.elastic import last_state
from lockstep.elastic.last_state import LastState

REPORT = {
    "kind": "round_over",
    "operation": 5,
    "is_prepared": False,
    "reason": "lost",
    "can_stay": True,
    "can_transfer_state": True,
    "part": 0,
    "parts": 1,
    "microbatches": 0,
    "has_state": True,
}


class Ranks:
    """Two members that report, and write their state when they are asked to."""

    def __init__(self, checkpoints: Path, reports: dict[int, dict[str, Any]]) -> None:
        self.running = [2, 3]
        self.state = LastState(self)  # type: ignore[arg-type]
        self.checkpoints, self.orders, self.removed = checkpoints, list[Any](), ""
        self._reports = reports

    def send(self, member: int, message: dict[str, Any]) -> None:
        if message["kind"] == "lost" and member in self._reports:
            self.state.note_report(member, self._reports[member])
        if message["kind"] == "transfer_state":
            self.orders.append((member, message["operation"], message["commit"]))
            step = Path(message["folder"]) / "step-5"
            step.mkdir()
            (step / "state").write_text("41")

    def process_events(self, timeout: float) -> None:
        for member, *_ in self.orders:
            written = {"kind": "transferred", "checkpoints": str(self.checkpoints)}
            self.state.note_report(member, written)

    def remove_at_end(self, folder: str) -> None:
        self.removed = folder


def test_one_member_writes_a_checkpoint(tmp_path, capfd):
    prepared = {**REPORT, "is_prepared": True}
    ranks = Ranks(tmp_path / "checkpoints", {2: prepared, 3: prepared})
    ranks.state.save()
    assert ranks.orders == [(2, 5, True)]
    assert (tmp_path / "checkpoints" / "step-5" / "state").read_text() == "41"
    assert "the state after step 5 is saved" in capfd.readouterr().err
    assert not Path(ranks.removed).exists()


def test_a_member_that_cannot_write_leaves_it_to_another(tmp_path):
    ranks = Ranks(tmp_path / "checkpoints", {2: {**REPORT, "can_transfer_state": False}, 3: REPORT})
    ranks.state.save()
    assert ranks.orders == [(3, 5, False)]


def test_nothing_is_written_without_a_folder_or_a_report(tmp_path, monkeypatch):
    monkeypatch.setattr(last_state, "REPORT_TIMEOUT", 0.0)
    ranks = Ranks(tmp_path / "elsewhere" / "checkpoints", {2: REPORT, 3: REPORT})
    ranks.state.save()
    assert [*tmp_path.iterdir()] == []
    silent = Ranks(tmp_path / "checkpoints", {})
    silent.state.save()
    assert (silent.orders, [*tmp_path.iterdir()]) == ([], [])


def test_the_report_of_an_earlier_round_does_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(last_state, "REPORT_TIMEOUT", 0.0)
    ranks = Ranks(tmp_path / "checkpoints", {3: REPORT})
    ranks.state.note_report(2, REPORT)
    ranks.state.note_round(2)
    ranks.state.save()
    assert ranks.orders == [(3, 5, False)]
