"""The report of a run: its text and figures, from records written by hand."""

import hashlib
import os
import re
import time

import pytest

import records
from lockstep.formatting import format_percent
from lockstep.launcher.run_folder import RECORD_FILE
from lockstep.record.logged_value import convert_value
from lockstep.record.reader import read_run
from lockstep.tools.report.breakdown import (
    peak_memory,
    resume_table,
    time_by_rank,
    time_shares,
)
from lockstep.tools.report.run_report import report_html
from lockstep.tools.report.summary import find_slowest_rank, summarize_run
from lockstep.tools.report.summary_text import (
    checkpoint_sentence,
    headline,
    state_sentence,
    timing_sentences,
)


@pytest.fixture
def run(tmp_path):
    return read_run(records.write(tmp_path / "night", records.whole()))


def aged(folder):
    """Make a record look as if nothing had been written for a day."""
    then = time.time() - 86400
    os.utime(folder / RECORD_FILE, (then, then))
    return folder


def test_the_headline_has_quality_layout_and_speed(run):
    well, fast = headline(run, summarize_run(run))
    assert well == "digits: accuracy 91.2%, loss 0.2500 on held-out samples after 2 epochs."
    assert fast == (
        "Net of 21,840 parameters on 2 replicas, 8 micro-batches, gloo, cpu: 640 samples in "
        "20 steps took 2.50 s, 2,207 samples/s during steps on average."
    )


def test_values_of_the_script_are_shown(tmp_path):
    """The last histogram and image of each name, and a chart of each number."""
    lines = records.whole()
    for step in (3, 7):
        for kind, value in (("histogram", [step, 1.0]), ("image", [[step / 10]]), ("scalar", step)):
            fields = convert_value(kind, value, kind)
            lines.insert(-1, {"kind": "log", "t": 1, "step": step, "name": f"my {kind}", **fields})
    run = read_run(records.write(tmp_path / "night", lines))
    page = report_html(run)
    assert page.count("data:image/png;base64,") == 1
    assert run.logged[-2]["image"] in page
    assert "my image, step 7" in page
    assert re.search(r"2 values from 1[.0]* to 7[.0]*", page)
    assert 'id="chart-log-my scalar"' in page
    lines.insert(-1, records.resume(5, 0))
    resumed = read_run(records.write(tmp_path / "resumed", lines))
    assert [line["step"] for line in resumed.logged] == [3, 3, 3]


def test_an_evaluation_of_averaged_weights_is_named(tmp_path):
    lines = records.whole()
    for line in lines:
        if line["kind"] == "epoch":
            line["evaluation"] = line["evaluation"] | {"ema": True}
    run = read_run(records.write(tmp_path / "night", lines))
    assert "on held-out samples (EMA) after" in headline(run, summarize_run(run))[0]
    page = report_html(run)
    assert "held-out (EMA) loss" in page
    assert "held out (EMA)" in page


def test_the_slowest_rank_is_named(run):
    assert timing_sentences(run) == [
        "Rank 1 is the slowest: it works 11.6 ms per step on average, 31.1% more than the mean of "
        "the ranks, and the others wait for it. It spends the time loading data."
    ]


def test_a_rank_that_works_between_steps_is_the_slowest(tmp_path):
    """In the record of rank 0, which waits for it, nothing else says so."""
    outside = [[0.0, 0.2], [0.0, 0.4], None]  # None: as in earlier records
    lines = [
        records.step(number, ranks=[[0.006, 0.002, 0.2, 0.0], [0.005, 0.002, 0.0, 0.0]])
        | ({} if values is None else {"outside": values})
        for number, values in enumerate(outside)
    ]
    run = read_run(records.write(tmp_path / "run", [records.HEADER, *lines, records.END]))
    (sentence,) = timing_sentences(run)
    assert sentence.startswith("Rank 1 is the slowest: it works 205 ms per step on average, ")
    assert "It spends the time between steps: in the body of the loop, callbacks, " in sentence
    first, second = time_by_rank(run)
    assert first.shares["outside steps"] == 0.0
    assert second.shares["outside steps"] == pytest.approx(0.6 / 0.621)
    share = time_shares(run)["outside steps"]
    assert share == pytest.approx(0.6 / 1.245)
    assert f"outside steps {format_percent(share)}" in report_html(run)


def test_the_page_is_complete(run):
    page = report_html(run)
    assert records.END["digest"] in page
    assert "lockstep train digits -n 2 --note &#39;two words&#39;" in page
    assert "OMP_NUM_THREADS" in page
    assert "8.00 GB" in page
    assert page.count('class="chart"') == 3
    assert "310 MB" in page
    assert "rank 1, after 50.0 ms: rank 1 &lt;b&gt;limps&lt;/b&gt; &amp; waits" in page


def test_findings_of_the_audit_are_among_the_warnings(tmp_path):
    finding = {"kind": "audit", "step": 3, "rank": 1, "message": "core 4 computed <wrong>"}
    run = read_run(records.write(tmp_path / "audited", [*records.whole()[:-1], finding]))
    assert "rank 1: core 4 computed &lt;wrong&gt;" in report_html(run)


def test_the_learning_rate_is_drawn_where_it_changes(run, tmp_path):
    assert 'id="chart-lr"' not in report_html(run)
    lines = [records.step(n, lr=min(0.01 * (n + 1), 0.09 - 0.0025 * n)) for n in range(20)]
    changing = read_run(records.write(tmp_path / "lr", [records.HEADER, *lines, records.END]))
    page = report_html(changing)
    assert "0.01 to 0.0725 to 0.0425" in page
    assert 'id="chart-lr"' in page


def test_both_digests_are_named(run):
    page = report_html(run)
    for what, name in (("weights", "digest"), ("optimizer state", "optimizer_digest")):
        assert f"Digest of the {what} <code" in page
        assert records.END[name] in page


def test_an_optimizer_without_state_has_no_digest(tmp_path):
    """The page showed the hash of nothing."""
    digest = hashlib.sha256().hexdigest()
    end = records.END | {"optimizer_digest": digest}
    page = report_html(read_run(records.write(tmp_path, [records.HEADER, records.step(0), end])))
    assert "Digest of the optimizer state <code>no state<" in page
    assert digest not in page


def test_a_script_is_shown_with_its_command(tmp_path):
    for words, shown in (
        (["job/train.py", "--lr", "0.1"], "python job/train.py --lr 0.1"),
        (["lockstep", "run", "-n", "2", "train.py"], "lockstep run -n 2 train.py"),
    ):
        run = read_run(records.write(tmp_path, records.whole(command=words)))
        assert f'<pre id="command">{shown}</pre>' in report_html(run)


def test_a_resumption_that_fails_at_once_is_said_to_have_failed(tmp_path):
    """The message alone reads as if the run itself had failed."""
    failed = records.END | {"state": "failed", "message": "another batch size", "steps": 0}
    lines = [*records.whole()[:-1], records.resume(20, 2), failed]
    run = read_run(records.write(tmp_path / "night", lines))
    sentence = state_sentence(run, summarize_run(run))
    assert sentence == "Resuming after step 20 failed: another batch size"
    lines = [*lines[:-1], records.step(20), failed | {"steps": 21}]
    run = read_run(records.write(tmp_path / "later", lines))
    assert state_sentence(run, summarize_run(run)) == "another batch size"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([{**records.END, "state": "failed", "message": "rank 1 fell"}], "rank 1 fell"),
        ([], "This run ended without a last line, 40.0 ms after its start, in epoch 1"),
    ],
)
def test_failed_and_died_runs_are_marked(tmp_path, lines, words):
    steps = [records.step(number) for number in range(5)]
    folder = aged(records.write(tmp_path / "r", [records.HEADER, *steps, *lines]))
    assert words in report_html(read_run(folder))


@pytest.mark.parametrize("keep", range(len(records.whole()) + 1))
def test_every_beginning_of_a_record_renders(tmp_path, keep):
    lines = records.whole()
    tail = "" if keep == len(lines) else '{"kind": "step", "loss"'
    folder = aged(records.write(tmp_path / "r", lines[:keep], tail))
    if keep == 0:
        folder = aged(records.write(tmp_path / "r", []))
    assert "</html>" in report_html(read_run(folder))


@pytest.mark.parametrize("name", ["header", "step", "epoch", "end"])
def test_a_record_without_any_one_field_renders(tmp_path, name):
    lines = records.whole()
    at = next(n for n, line in enumerate(lines) if line["kind"] == name.replace("header", "run"))
    for field in lines[at]:
        if field != "kind":
            partial = {key: value for key, value in lines[at].items() if key != field}
            folder = records.write(tmp_path / field, [*lines[:at], partial, *lines[at + 1 :]])
            assert "</html>" in report_html(read_run(folder))


def test_a_newer_version_is_rendered_with_a_remark(tmp_path):
    lines = records.whole(version=7, shape_of_the_moon="full")
    page = report_html(read_run(records.write(tmp_path, lines)))
    assert "The record has version 7" in page
    assert page.count('class="chart"') == 3


def test_a_nan_loss_renders(tmp_path):
    lines = [records.HEADER, *(records.step(n, loss=None) for n in range(3)), records.END]
    page = report_html(read_run(records.write(tmp_path, lines)))
    assert 'id="chart-loss"' not in page
    assert 'id="chart-seconds"' in page


@pytest.mark.parametrize("loss", [1e308, -1e308, 1e-320, 0.0])
def test_a_loss_of_any_size_renders(tmp_path, loss):
    lines = [records.HEADER, records.step(0, loss=loss), records.step(1), records.END]
    assert 'id="chart-loss"' in report_html(read_run(records.write(tmp_path, lines)))


def test_only_some_of_many_epochs_are_shown(tmp_path):
    rows = [[0.006 + rank / 1e5, 0.002, 0.0, 0.0] for rank in range(100)]
    lines = [records.HEADER, records.step(0, ranks=rows), *(records.epoch(n) for n in range(500))]
    page = report_html(read_run(records.write(tmp_path, [*lines, records.END])))
    assert "440 epochs in the middle are not listed" in page
    assert len(page) < 100_000


@pytest.fixture
def resumed(tmp_path):
    return read_run(records.write(tmp_path / "night", records.resumed()))


def test_checkpoints_and_resumptions_are_reported(resumed):
    assert checkpoint_sentence(resumed) == ("3 checkpoints, the last one after 16 steps (340 kB).")
    page = report_html(resumed)
    assert "the last one after 16 steps" in page
    assert "The run was resumed twice." in page
    assert "2 replicas × 2 stages, 8 micro-batches, gloo, cpu" in page
    assert "torch: 2.12.0 before, 2.13.0 now; cores: 8 before, 2 now" in page
    assert resume_table(resumed) == [
        ["0", "2026-11-21T07:52:00+00:00", "2 replicas × 2 stages, 8 micro-batches, gloo, cpu", ""],
        [
            *("12", "2026-11-22T03:00:00+00:00", "2 replicas, 8 micro-batches, gloo, cpu"),
            "torch: 2.12.0 before, 2.13.0 now; cores: 8 before, 2 now",
        ],
        ["16", "2026-11-22T03:00:00+00:00", "2 replicas, 8 micro-batches, gloo, cpu", ""],
    ]


def test_a_resumed_run_counts_each_step_once(resumed):
    well, fast = headline(resumed, summarize_run(resumed))
    assert well.endswith("after 2 epochs.")
    assert fast.startswith(
        "Net of 21,840 parameters on 2 replicas, 8 micro-batches, gloo, cpu: 640 samples in "
        "20 steps took 2.00 s, "
    )
    assert summarize_run(resumed).seconds == 2.0, "not that of the last process alone"


def test_times_of_a_resumed_run_are_those_of_its_last_layout(resumed):
    changed, rank = timing_sentences(resumed)
    assert changed == "The layout changed at step 12; times and speeds are those since."
    assert rank.startswith("Rank 1 is the slowest: it works ")
    assert find_slowest_rank(resumed).seconds < 0.1
    assert summarize_run(resumed).step_seconds == pytest.approx(0.01)
    assert summarize_run(resumed).speed == pytest.approx(8 * 32 / 0.17)
    assert [one.rank for one in time_by_rank(resumed)] == [0, 1]
    assert [one.num_bytes for one in peak_memory(resumed)] == [300_000_000, 310_000_000]


@pytest.mark.parametrize("state", ["stopped", "failed", None])
def test_the_command_that_resumes_a_run_is_given(tmp_path, state):
    end = [records.END | {"state": state, "message": "rank 1 failed."}] if state else []
    folder = records.write(tmp_path / "night", [*records.resumed()[:-1], *end])
    run = read_run(folder if state else aged(folder))
    assert "resume it" not in state_sentence(run, summarize_run(run)).lower()
    (folder / "checkpoints" / "step-16").mkdir(parents=True)
    words = {
        "stopped": "This run was stopped on request 2.00 s after its start, in epoch 2, step 19.",
        "failed": "rank 1 failed.",
    }
    sentence = state_sentence(run, summarize_run(run))
    assert sentence.startswith(words.get(state, "This run ended without a last line"))
    assert sentence.endswith(f" Resume it with: lockstep train --resume {folder}")


@pytest.mark.parametrize("name", ["step", "bytes", "layout", "differences", "resumed"])
def test_a_resumed_record_without_a_field_renders(tmp_path, name):
    lines = [{key: value for key, value in line.items() if key != name}
             for line in records.resumed()]  # fmt: skip
    run = read_run(records.write(tmp_path, lines))
    assert "The run was resumed twice." in report_html(run)


def test_pages_of_many_steps_are_small(tmp_path):
    """The curves are downsampled to 400 points, so ten thousand steps stand for any number."""
    lines = [records.step(n, per_epoch=100, loss=1 + n % 7 / 7) for n in range(10_000)]
    epochs = [records.epoch(n) for n in range(100)]
    run = read_run(records.write(tmp_path, [records.HEADER, *lines, *epochs, records.END]))
    assert len(report_html(run)) < 300_000
