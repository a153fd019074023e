"""The tables and the picture of pipelines, from outcomes written by hand."""

from benchmarks.pipeline.case import Case
from benchmarks.pipeline.comparison import Outcome
from benchmarks.pipeline.plot import draw, speedups
from benchmarks.pipeline.table import caption, heading, overhead_lines, records, rows


def outcomes(splits, **times):
    case = Case("tiny", splits, 32, 128)
    named = {name.replace("_", "-"): each for name, each in times.items()}
    return [Outcome(name, case, sorted(each)) for name, each in named.items()]


FEW = outcomes(2, alone=[1.0], copies=[4.0, 4.0, 5.0], rpc=[4.0])
MANY = outcomes(8, alone=[1.0], copies=[4.0], rpc=[3.0], lockstep_1=[4.0], lockstep_zb=[2.25])


def test_a_pipeline_is_compared_with_the_copies_and_the_ideal():
    MANY[4].digest = "0123456789"
    cells = {each.split()[0]: each.split() for each in rows(MANY)}
    assert cells["rpc"] == [
        "rpc",
        "3.00",
        "s",
        "3.00",
        "s",
        "3.00",
        "s",
        "10.7",
        "1.33",
        "75%",
        "right",
    ]
    assert cells["lockstep-zb"][7:] == ["14.2", "1.78", "100%", "01234567"]
    assert cells["lockstep-1"][7:] == ["8.0", "-", "-", "right"]
    assert cells["alone"][-1] == "-"
    assert cells["ideal"][1:3] == ["2.25", "s"]
    assert heading(MANY[0].case).startswith("# 8 micro-batches\n")


def test_errors_and_wrong_results_are_shown():
    able, wrong, unable = outcomes(2, copies=[4.0], rpc=[4.0], torch_zb=[])
    wrong.wrong, unable.error = "losses ...", "no luck"
    lines = rows([able, wrong, unable])
    assert lines[1].endswith("WRONG")
    assert lines[2].endswith("error: no luck")


def test_the_cost_of_a_micro_batch_is_the_slope():
    lines = overhead_lines([FEW, MANY])
    assert lines[1:] == ["alone                    0.0", "copies                   0.0",
                         "rpc                -166666.7"]  # fmt: skip
    assert overhead_lines([MANY]) == []


def test_records_hold_what_the_table_shows():
    found = records(MANY, {"machine": "m", "command": "c"})
    by_name = {each["contender"]: each for each in found}
    assert by_name["rpc"]["of_ideal"] == 0.75
    assert by_name["rpc"]["stages"] == 2
    assert by_name["copies"]["stages"] == 1
    assert "of_ideal" not in by_name["copies"]
    assert {each["machine"] for each in found} == {"m"}
    assert by_name["lockstep-zb"]["times"] == [2.25]


def test_the_picture_has_a_curve_for_each_pipeline():
    curves = speedups([FEW, MANY])
    assert list(curves) == ["ideal", "rpc", "lockstep-zb"]
    assert curves["rpc"] == [(2, 1.0), (8, 4 / 3)]
    text = draw([FEW, MANY], "a machine", "a command").svg()
    for name in ("rpc 1.33", "lockstep-zb 1.78", "a machine", "a command"):
        assert name in text
    assert "copies" not in text


def test_the_caption_says_what_was_measured():
    assert "32 samples per batch; 2 stages" in caption(MANY)
    pictures = Outcome("copies", Case("resnet50", 2, 32, 128))
    assert "images of 128x128" in caption([pictures])
