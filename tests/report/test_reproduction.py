"""What a report says of sources and fingerprints."""

import tracemalloc

import records
from lockstep.model.fingerprint import StepFingerprint
from lockstep.model.fingerprint_file import FingerprintFile, encode_fingerprint
from lockstep.record.reader import read_run
from lockstep.tools.report.reproduction import summarize_reproduction
from lockstep.tools.report.run_report import report_html


def write_fingerprints(folder, rank, steps, launch="a"):
    file = FingerprintFile(folder, rank)
    file.write("begin", launch=launch, t=1.0, step=0, resumes=0)
    for step in steps:
        file.write("step", **encode_fingerprint(StepFingerprint(0, step)))
    return file.path


def checkpointed(folder):
    saved = [records.checkpoint(10, digest="ab" * 32), records.checkpoint(20, digest=None)]
    lines = records.whole(sources="sources-2")
    return records.write(folder, [*lines[:-1], *saved, lines[-1]])


def test_fingerprints_and_sources_are_shown(tmp_path):
    folder = checkpointed(tmp_path)
    for rank in range(2):
        write_fingerprints(folder, rank, range(0, 20, 5))
    run = read_run(folder)
    found = summarize_reproduction(run)
    assert found.remarks == []
    assert found.sentences == [
        "Copies of the program's own files are in sources-2.",
        "Hashes of what each unit computed in 4 steps (0 to 15, 2 ranks) are in fingerprints.",
    ]
    assert found.sentences[1] in report_html(run)


def test_a_report_reads_fingerprints_one_line_at_a_time(tmp_path):
    folder = checkpointed(tmp_path)
    file = FingerprintFile(folder, 0)
    file.write("begin", launch="a", t=1.0, step=0, resumes=0)
    values = {f"weight {number}": number for number in range(2000)}
    for step in range(30):
        file.write("step", **encode_fingerprint(StepFingerprint(0, step, state=values)))
    tracemalloc.start()
    try:
        found = summarize_reproduction(read_run(folder))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "in 30 steps (0 to 29, 1 rank)" in found.sentences[1]
    assert peak < file.path.stat().st_size / 2


def test_a_run_that_left_nothing_shows_nothing(tmp_path):
    run = read_run(records.write(tmp_path, records.whole()))
    found = summarize_reproduction(run)
    assert (found.sentences, found.remarks) == ([], [])
