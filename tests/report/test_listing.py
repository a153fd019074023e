"""The table of runs: one line each, from the ends of their records."""

import json

import records
from lockstep.record import reader as reading
from lockstep.record.recorder import FILE
from lockstep.report import listing


def test_one_line_a_run_the_oldest_first(tmp_path):
    records.write(tmp_path / "new", records.whole(started="2026-11-22T00:00:00+00:00"))
    records.write(tmp_path / "old", records.whole(started="2026-11-20T00:00:00+00:00"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("")
    names, rows = listing.table(listing.of(tmp_path))
    assert [row[0] for row in rows] == ["old", "new"]
    assert dict(zip(names, rows[0], strict=True)) == {
        "run": "old", "state": "done", "recipe": "digits",
        "layout": "2 replicas", "loss": "0.2500",
        "accuracy": "91.2%", "samples/s": "2,207", "digest": "abababab",
    }  # fmt: skip


def test_a_record_that_cannot_be_read_is_a_line_too(tmp_path):
    records.write(tmp_path / "good", records.whole())
    records.write(tmp_path / "bad", [], tail="PNG\n")
    found = listing.of(tmp_path)
    _, rows = listing.table(found)
    assert [row[:2] for row in rows] == [["bad", "unreadable"], ["good", "done"]]
    plain = json.loads(json.dumps([one.plain() for one in found]))
    assert "is not the record of a run" in plain[0]["message"]
    assert plain[1]["metrics"] == {"accuracy": 0.9125}


def test_a_glance_reads_the_ends_only(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "TAIL", 3000)
    lines = [records.HEADER, *map(records.step, range(500)), records.epoch(49), records.END]
    place = records.write(tmp_path, lines)
    run = reading.glance(place)
    assert run.header == records.HEADER
    assert run.end == records.END
    assert 5 < len(run.steps) < 20
    assert run.steps.step[-1] == 499
    assert run.remarks == []


def test_a_glance_at_a_short_record_reads_it_all(tmp_path):
    place = records.write(tmp_path, records.whole())
    assert len(reading.glance(place).steps) == 20
    (place / FILE).write_text("")
    assert len(reading.glance(place).steps) == 0
