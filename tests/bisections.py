"""The result of a bisection, made of written records, for tests of how it is shown."""

from dataclasses import replace

import records
from lockstep.audit.operator_call import OperatorCall
from lockstep.tools.replay.bisection import Bisection
from lockstep.tools.replay.divergence import Divergence
from lockstep.tools.replay.element_difference import ElementDifference
from lockstep.tools.replay.record_difference import first_record_difference
from lockstep.tools.replay.recorded_run import read_recorded_run

MODULE = "layers.1.attention.projection"

CALL = OperatorCall(
    "aten.add.Tensor", "forward", 2, MODULE, (1, 2), (3,), "alpha=1", (0, 0),
    (f"{MODULE}.weight: float32[64, 64]", "float32[16, 64]"), ("float32[16, 64]",), (-1, -1),
    "train.py:3 in forward",
)  # fmt: skip

DIVERGENCE = Divergence(
    7, "forward", "arguments", "aten.add.Tensor is called with different arguments: 1 and "
                               "<b>two</b>",
    2, MODULE, None, CALL, replace(CALL, arguments="alpha=<b>two</b>"),
    ElementDifference((3, 12), 0.25, 0.5, 8388608, 17),
)  # fmt: skip


def bisected(folder):
    """Return what was found between two runs of 20 steps, of which the second has two more."""
    runs = []
    for name, options in (("night-a", {}), ("night-b", {"options": {"lr": 0.05, "seed": 8}})):
        lines = [*records.whole(name=name, **options)]
        if options:
            lines[-1:] = [records.step(20), records.step(21), records.END]
            for line in lines:
                if line["kind"] == "step" and line["step"] >= 7:
                    line["loss"] *= 1.001
        place = records.write(folder / name, [{**lines[0], "sources": "sources"}, *lines[1:]])
        script = place / "sources" / "home" / "u" / "train.py"
        script.parent.mkdir(parents=True)
        script.write_text(f"import torch\n\nx = x + y  # {name}\n")
        runs.append(read_recorded_run(place))
    a, b = runs
    return Bisection(
        a,
        b,
        first_record_difference(a.steps, b.steps),
        DIVERGENCE,
        True,
        (True, True),
        ("night-b: data.pt has changed",),
        "Net",
        4.2,
    )
