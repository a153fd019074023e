"""TensorBoard: the names of the record; a failure does not affect training."""

import importlib.util

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lockstep as ls
import records
from lockstep.kernel.errors import UsageError
from lockstep.record.logged_value import convert_value
from lockstep.record.loggers import collect_scalars

STEP = {
    "loss", "lr", "seconds", "samples_per_second", "accuracy",
    "compute", "communication", "waiting", "data",
}  # fmt: skip
HELD_OUT = {"held_out/loss", "held_out/accuracy"}


def feed(writer, lines):
    for line in lines:
        fields = dict(line)
        writer.write(fields.pop("kind"), **fields)
    writer.close()
    writer.close()


def test_scalars_have_the_names_of_the_record():
    assert set(collect_scalars("step", records.step(3))) == STEP
    assert set(collect_scalars("epoch", records.epoch(0))) == HELD_OUT
    assert collect_scalars("step", records.step(3))["compute"] == pytest.approx(0.0065)
    assert collect_scalars("step", records.step(3))["samples_per_second"] == pytest.approx(3200)
    assert collect_scalars("step", {"loss": 1.0, "loss_scale": 512.0})["loss_scale"] == 512
    assert collect_scalars("step", {"loss": 1.0, "norm": 2.0})["gradient_norm"] == 2
    averaged = {"evaluation": {"loss": 1.0, "metrics": {}, "ema": True}}
    assert collect_scalars("epoch", averaged) == {"held_out_ema/loss": 1}
    assert collect_scalars("end", records.END) == {}
    assert collect_scalars("epoch", {"epoch": 0, "loss": 1.0}) == {}


def test_tensorboard_shows_every_name(tmp_path):
    feed(ls.loggers.TensorBoard(tmp_path / "tb"), records.whole())
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == STEP | HELD_OUT
    losses = events.Scalars("loss")
    assert [event.step for event in losses] == list(range(20))
    assert losses[3].value == pytest.approx(records.step(3)["loss"])
    assert [event.step for event in events.Scalars("held_out/loss")] == [9, 19]
    texts = {tag.removesuffix("/text_summary") for tag in events.Tags()["tensors"]}
    assert {"digest", "warning", "run"} <= texts


def test_tensorboard_shows_what_a_script_logs(tmp_path):
    values = {"temperature": (0.5, "scalar"), "weights": ([1.0, 2.0, 2.0], "histogram"),
              "picture": (np.eye(4), "image")}  # fmt: skip
    lines = [{"kind": "log", "step": 19, "name": name, **convert_value(name, *value)}
             for name, value in values.items()]  # fmt: skip
    feed(ls.loggers.TensorBoard(tmp_path / "tb"), [*records.whole()[:-1], *lines, records.END])
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    (scalar,) = events.Scalars("temperature")
    (histogram,) = events.Histograms("weights")
    assert (scalar.step, scalar.value) == (19, 0.5)
    assert (histogram.histogram_value.num, histogram.histogram_value.max) == (3, 2)
    (image,) = events.Images("picture")
    assert (image.height, image.width) == (4, 4)
    assert image.encoded_image_string.startswith(b"\x89PNG")


def test_a_logger_without_lines_is_never_opened(tmp_path):
    """Other ranks make the writer too, and write nothing."""
    ls.loggers.TensorBoard(tmp_path / "tb").close()
    assert not (tmp_path / "tb").exists()


def test_a_failing_logger_is_disabled_with_one_message(tmp_path, capsys):
    (tmp_path / "tb").write_text("a file instead of a folder")
    writer = ls.loggers.TensorBoard(tmp_path / "tb")
    feed(writer, records.whole())
    assert capsys.readouterr().err.count("lockstep: TensorBoard failed and is disabled") == 1
    assert "FileExistsError" in writer.failure


def test_a_missing_package_raises_an_error(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install tensorboard"):
        ls.loggers.TensorBoard("tb")


def test_every_must_be_positive(tmp_path):
    with pytest.raises(UsageError, match="every=0"):
        ls.loggers.TensorBoard(tmp_path, every=0)


def killed():
    """Return the lines of a run that was killed after step 13."""
    return [records.HEADER, *map(records.step, range(10)), records.epoch(0),
            *(records.step(number, loss=9.0) for number in range(10, 14))]  # fmt: skip


def rest():
    """Return the lines of the process that resumed it at step 10, on one rank."""
    layout = records.HEADER["layout"] | {"world_size": 1}
    return [records.resume(10, 1, layout=layout), records.epoch(0, 0.4),
            *map(records.step, range(10, 20)), records.epoch(1, 0.25), records.END]  # fmt: skip


def test_tensorboard_hides_steps_that_are_taken_again(tmp_path):
    feed(ls.loggers.TensorBoard(tmp_path / "tb"), killed())
    feed(ls.loggers.TensorBoard(tmp_path / "tb"), rest())
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    losses = events.Scalars("loss")
    assert [event.step for event in losses] == list(range(20))
    assert max(event.value for event in losses) < 9.0
    assert [event.step for event in events.Scalars("held_out/loss")] == [9, 9, 19]


@pytest.mark.parametrize("kind", ["resume", "round"])
def test_tensorboard_hides_steps_that_the_same_process_repeats(tmp_path, kind):
    first, *others = rest()
    feed(ls.loggers.TensorBoard(tmp_path / "tb"), [*killed(), first | {"kind": kind}, *others])
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(20))
    assert max(event.value for event in events.Scalars("loss")) < 9.0
