"""The rounds of an elastic run: sentences, tables, and the drawing of its members."""

import json

import pytest

import records
from lockstep.record.reader import read_run
from lockstep.report.rounds import CHAOS_FILE, HTML_WIDTH, summarize_rounds
from lockstep.report.run_report import report_html, report_markdown
from lockstep.report.summary import summarize


@pytest.fixture
def run(tmp_path):
    return read_run(records.write(tmp_path, records.elastic()))


def drawn(run):
    """Return (member, begin, end, whether it was killed) of each place, as fractions."""
    drawing = summarize_rounds(run).drawing
    return [
        [
            (int(bar.tooltip.split(":")[0].removeprefix("member ")), bar.x / HTML_WIDTH,
             (bar.x + bar.width) / HTML_WIDTH, bar.is_killed)
            for bar in lane.bars
        ]
        for lane in drawing.lanes
    ]  # fmt: skip


def test_a_run_without_rounds_has_no_section_about_them(tmp_path):
    run = read_run(records.write(tmp_path, records.whole()))
    found = summarize_rounds(run)
    assert (found.sentences, found.rows, found.kills, found.drawing) == ([], [], [], None)
    assert "Rounds" not in report_html(run)
    assert "Rounds" not in report_markdown(run)


def test_deaths_newcomers_and_lost_time_are_told(run):
    deaths, cost, joins = summarize_rounds(run).sentences
    assert deaths == "5 rounds: 2 ranks died (SIGKILL), 2 joined."
    assert "cost 753 ms (median; at most 1.25 s, 1.51 s in total)" in cost
    assert joins == "Training paused for 125 ms when a rank joined (median)."


def test_each_round_is_a_row(run):
    rows = summarize_rounds(run).rows
    assert rows[0] == ["1", "6", "60.0 ms", "1", "1 (SIGKILL)", "", "", "250 ms", "4.00 ms"]
    assert rows[1] == ["2", "9", "90.0 ms", "2", "", "2", "", "125 ms", "0 s"]
    assert len(rows) == 4


def test_a_newcomer_takes_the_place_of_a_dead_member(run):
    first, second = drawn(run)
    assert [bar[0] for bar in first] == [0, 3]
    assert [bar[0] for bar in second] == [1, 2]
    assert [bar[3] for bar in (*first, *second)] == [True, False, True, False]
    for dead, newcomer in (first, second):
        assert dead[1] == 0
        assert dead[2] <= newcomer[1]
        assert newcomer[2] == 1


def test_the_time_of_a_death_is_when_it_was_noticed(tmp_path):
    lines = [
        *(records.HEADER, *map(records.step, range(2))),
        records.new_round(1, 2, t=4.0, lost=[{"member": 0, "signal": 9}]),
        *(*map(records.step, range(2, 4)), records.END | {"t": 5.0}),
    ]
    (killed,), (survivor,) = drawn(read_run(records.write(tmp_path, lines)))
    assert killed == (0, 0, 0.75, True)  # 4 s, of which training paused for 0.25 s
    assert survivor == (1, 0, 1, False)


def test_a_member_that_ended_because_another_died_was_not_killed(tmp_path):
    lost = [{"member": 0, "signal": 9}, {"member": 1, "signal": 0}]
    lines = [
        *(records.HEADER, *map(records.step, range(2))),
        records.new_round(1, 2, t=4.0, lost=lost, joined=[2, 3]),
        *(*map(records.step, range(2, 4)), records.END | {"t": 5.0}),
    ]
    run = read_run(records.write(tmp_path, lines))
    ended = [bar for lane in drawn(run) for bar in lane if bar[0] < 2]
    assert [(bar[0], bar[3]) for bar in ended] == [(0, True), (1, False)]
    tooltips = [bar.tooltip for lane in summarize_rounds(run).drawing.lanes for bar in lane.bars]
    assert any("member 1: " in each and "lost another member" in each for each in tooltips)


def test_members_that_left_and_those_of_a_later_launch(tmp_path):
    layout = records.HEADER["layout"] | {"world_size": 3}
    lines = [
        *(records.HEADER, records.step(0), records.new_round(1, 1, t=0.5, joined=[2])),
        records.resume(1, t=1.0, layout=layout),
        *(records.step(1), records.new_round(1, 2, t=1.5, left=[1, 2])),
        *(records.new_round(2, 2, t=2.0, joined=[3]), records.END | {"t": 3.0}),
    ]
    run = read_run(records.write(tmp_path, lines))
    first, second, third = drawn(run)
    assert first == [(0, 0, 1, False)]
    assert second == [(1, 0, 0.25, False), (3, 0.5, 1, False)]
    assert third == [(2, 0, 0.25, False)]
    assert "3 left" not in summarize_rounds(run).sentences[0]
    assert "2 joined, 2 left" in summarize_rounds(run).sentences[0]


def test_many_places_and_rounds_stay_readable(tmp_path):
    layout = records.HEADER["layout"] | {"world_size": 40}
    rounds = [records.new_round(n, n, t=n / 10) for n in range(1, 101)]
    lines = [records.HEADER | {"layout": layout}, records.step(0), *rounds]
    found = summarize_rounds(read_run(records.write(tmp_path, lines)))
    assert (len(found.drawing.lanes), found.drawing.num_hidden) == (32, 8)
    assert found.drawing.rounds == ()
    assert len(found.rows) == 41
    assert found.rows[20][0] == "... 60 more"


DAMAGED = [
    {"lost": "all", "joined": 3, "left": None, "t": None},
    {"lost": [3, {"member": "x"}, {"member": 2**70, "signal": "y"}], "joined": [True, "a", 2**80]},
    {"round": "first", "step": None, "world_size": [], "noticed": "now", "undone": {}},
]


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_lines_are_told_as_far_as_they_can_be(tmp_path, damage):
    lines = [records.HEADER, records.step(0), records.new_round(1, 1) | damage, records.END]
    run = read_run(records.write(tmp_path, lines))
    assert "Rounds" in report_html(run)
    assert "### Rounds" in report_markdown(run)


def test_what_chaos_found_is_part_of_the_report(run):
    kill = {"member": 1, "step": 6, "round": 1, "seconds_to_repeat": 0.26, "repeated_seconds": 4e-3}
    found = {"kills": 1, "planned": 2, "seed": 7, "equal": False, "deaths": [kill, "damaged"]}
    (run.folder / CHAOS_FILE).write_text(json.dumps(found))
    summary = summarize_rounds(run)
    assert summary.kills == [["1", "1", "6", "1", "260 ms", "4.00 ms"]]
    assert summary.sentences[-1] == (
        "`lockstep chaos` killed 1 rank with SIGKILL of 2 planned (seed 7); the final "
        "weights are different from those of the undisturbed run."
    )
    assert "260 ms" in report_html(run)
    (run.folder / CHAOS_FILE).write_text("oops")
    assert summarize_rounds(run).kills == []


def test_the_duration_of_an_elastic_run_is_that_of_all_its_processes(run):
    assert summarize(run).seconds == records.END["t"], "not that of the last rank 0's process"
