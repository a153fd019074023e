"""Loggers: the same names for all; a failing one does not affect training."""

import functools
import json
import sys
import types

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lockstep as ls
import records
from lockstep.kernel.errors import UsageError
from lockstep.record.logged_value import describe_value
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


class FakeRun:
    """Records what a Weights & Biases run is told, as its documentation names the calls."""

    def __init__(self):
        self.logged, self.summary, self.exit_codes = [], {}, []
        self.config = self
        self.changes = []

    def update(self, values, allow_val_change=None):
        """Change the config, which raises in W&B unless changes are allowed."""
        assert allow_val_change
        self.changes.append(values)

    def log(self, data, step=None):
        self.logged.append((step, data))

    def finish(self, exit_code=None):
        self.exit_codes.append(exit_code)


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package wandb."""
    module = types.ModuleType("wandb")
    module.__spec__ = types.SimpleNamespace(name="wandb")
    module.run, module.given = FakeRun(), []
    module.init = lambda **given: (module.given.append(given), module.run)[1]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.fixture
def mlflow(monkeypatch):
    """A stand-in for the package mlflow, which notes each call."""
    module = types.ModuleType("mlflow")
    module.__spec__ = types.SimpleNamespace(name="mlflow")
    module.calls = []

    def call(name, *args, **options):
        module.calls.append((name, args, options))
        run_id = options.get("run_id", f"id-{len(module.calls)}")
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

    for name in ("start_run", "log_params", "log_metrics", "set_tag", "end_run"):
        setattr(module, name, functools.partial(call, name))
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


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
    assert {
        "digest",
        "warning",
        "run/recipe",
        "run/layout.replicas",
        "run/environment.torch",
    } <= texts


def test_tensorboard_shows_what_a_script_logs(tmp_path):
    values = {"temperature": (0.5, "scalar"), "weights": ([1.0, 2.0, 2.0], "histogram"),
              "picture": (np.eye(4), "image")}  # fmt: skip
    lines = [{"kind": "log", "step": 19, "name": name, **describe_value(name, *value)}
             for name, value in values.items()]  # fmt: skip
    feed(ls.loggers.TensorBoard(tmp_path / "tb"), [*records.whole()[:-1], *lines, records.END])
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    (scalar,), (histogram,) = events.Scalars("temperature"), events.Histograms("weights")
    assert (scalar.step, scalar.value) == (19, 0.5)
    assert (histogram.histogram_value.num, histogram.histogram_value.max) == (3, 2)
    (image,) = events.Images("picture")
    assert (image.height, image.width) == (4, 4)
    assert image.encoded_image_string.startswith(b"\x89PNG")


def test_wandb_gets_the_same_names(wandb):
    feed(ls.loggers.WandB(project="digits", mode="offline"), records.whole())
    (given,) = wandb.given
    assert given["project"] == "digits"
    assert given["config"]["options.seed"] == 7
    assert [step for step, data in wandb.run.logged if "loss" in data] == list(range(20))
    assert {name for _, data in wandb.run.logged for name in data} == STEP | HELD_OUT
    assert wandb.run.summary["digest"] == records.END["digest"]
    assert "limps" in wandb.run.summary["warning at step 9"]
    assert wandb.run.exit_codes == [0]


def test_mlflow_gets_the_same_names_of_every_tenth_step(mlflow):
    feed(ls.loggers.MLflow(run_name="night"), records.whole())
    calls = {name: [(args, options) for n, args, options in mlflow.calls if n == name]
             for name, _, _ in mlflow.calls}  # fmt: skip
    assert calls["start_run"] == [((), {"run_name": "night"})]
    assert calls["log_params"][0][0][0]["layout.replicas"] == 2
    steps = [options["step"] for args, options in calls["log_metrics"] if "loss" in args[0]]
    assert steps == [0, 10]
    assert {name for args, _ in calls["log_metrics"] for name in args[0]} == STEP | HELD_OUT
    assert (("digest", records.END["digest"]), {}) in calls["set_tag"]
    assert calls["end_run"] == [(("FINISHED",), {})]


def test_a_run_without_an_end_is_closed_as_failed(wandb, mlflow):
    feed(ls.loggers.WandB(), records.whole()[:5])
    feed(ls.loggers.MLflow(), records.whole()[:5])
    assert wandb.run.exit_codes == [1]
    assert mlflow.calls[-1] == ("end_run", ("FAILED",), {})


def test_a_logger_without_lines_is_never_opened(wandb, tmp_path):
    """Other ranks make the writer too, and write nothing."""
    ls.loggers.WandB().close()
    ls.loggers.TensorBoard(tmp_path / "tb").close()
    assert wandb.given == []
    assert not (tmp_path / "tb").exists()


def test_a_failing_logger_is_disabled_with_one_message(wandb, capsys):
    def log(data, step=None):
        raise ConnectionError("no route")

    wandb.run.log = log
    writer = ls.loggers.WandB()
    feed(writer, records.whole())
    said = capsys.readouterr().err
    assert said.count("lockstep: WandB failed and is disabled") == 1
    assert "ConnectionError: no route" in writer.failure


def test_a_missing_package_raises_an_error():
    class Nowhere(ls.loggers.TensorBoard):
        package = "no_such_dashboard"

    with pytest.raises(UsageError, match="pip install no_such_dashboard"):
        Nowhere("tb")


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


def test_tensorboard_hides_steps_of_a_run_that_is_resumed_in_the_same_process(tmp_path):
    feed(ls.loggers.TensorBoard(tmp_path / "tb"), killed() + rest())
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(20))
    assert max(event.value for event in events.Scalars("loss")) < 9.0


def attached(logger, folder):
    logger.run_folder = folder
    return logger


def test_wandb_continues_the_run_of_the_same_folder(wandb, tmp_path):
    feed(attached(ls.loggers.WandB(project="digits"), tmp_path), killed())
    feed(attached(ls.loggers.WandB(project="digits"), tmp_path), rest())
    first, second = wandb.given
    assert "resume" not in first
    assert second == {"project": "digits", "id": first["id"], "resume": "allow"}
    assert wandb.run.changes[0]["layout.world_size"] == 1
    assert [step for step, data in wandb.run.logged if "loss" in data][-10:] == list(range(10, 20))


def test_a_new_rank_0_continues_the_run_of_the_one_that_died(wandb, tmp_path):
    lines = records.elastic()
    died = next(at for at, line in enumerate(lines) if line.get("round") == 3)
    feed(attached(ls.loggers.WandB(), tmp_path), lines[:died])
    assert len(wandb.given) == 1, "rounds that rank 0 survives open no other run"
    feed(attached(ls.loggers.WandB(), tmp_path), [lines[0], *lines[died:]])
    first, second = wandb.given
    assert (second["id"], second["resume"]) == (first["id"], "allow")


def test_new_runs_of_wandb_have_different_ids(wandb, tmp_path):
    for folder in (tmp_path, tmp_path, None):
        feed(attached(ls.loggers.WandB(), folder), killed())
    feed(attached(ls.loggers.WandB(id="mine"), tmp_path), killed())
    assert all("config" in given for given in wandb.given)
    ids = [given["id"] for given in wandb.given]
    assert len(set(ids)) == 4
    assert ids[-1] == "mine"


def test_mlflow_continues_the_run_of_the_same_folder(mlflow, wandb, tmp_path):
    feed(attached(ls.loggers.WandB(), tmp_path), killed())  # stores its id in the same file
    feed(attached(ls.loggers.MLflow(run_name="night"), tmp_path), killed())
    (tag, _, _), *_ = mlflow.calls
    assert tag == "start_run"
    mlflow.calls.clear()
    feed(attached(ls.loggers.MLflow(run_name="night"), tmp_path), rest())
    assert mlflow.calls[0] == ("start_run", (), {"run_name": "night", "run_id": "id-1"})
    assert "log_params" not in [name for name, _, _ in mlflow.calls], "parameters cannot change"
    ((_, (name, text), _),) = [call for call in mlflow.calls if "resumed" in str(call[1])]
    assert name == "resumed at step 10"
    assert "layout.world_size: 1" in text
    stored = json.loads((tmp_path / "dashboards.json").read_bytes())
    assert stored == {"wandb": wandb.given[0]["id"], "mlflow": "id-1"}


@pytest.mark.parametrize("content", ["[]", '{"wandb": 3}', "oops"])
def test_a_dashboard_without_a_stored_id_begins_a_run(wandb, mlflow, tmp_path, content):
    (tmp_path / "dashboards.json").write_text(content)
    for logger in (ls.loggers.WandB(), ls.loggers.MLflow()):
        feed(attached(logger, tmp_path), rest())
        assert logger.failure is None
    assert isinstance(wandb.given[0]["id"], str)
    assert mlflow.calls[0] == ("start_run", (), {})
    assert mlflow.calls[1][0] == "log_params"


@pytest.mark.parametrize("resume", ["1", ""])
def test_the_first_line_of_a_resumed_script_does_not_open_a_second_run(
    wandb, tmp_path, monkeypatch, resume
):
    """The script runs from its beginning, and the logger learns afterwards where it continues."""
    monkeypatch.setenv("LOCKSTEP_RUN", str(tmp_path))
    feed(ls.loggers.WandB(), killed())
    monkeypatch.setenv("LOCKSTEP_RESUME", resume)  # empty: by trainer.resume() in the script
    feed(ls.loggers.WandB(), [records.HEADER, *rest()])
    first, second = wandb.given
    assert (second["id"], second["resume"]) == (first["id"], "allow")
    assert wandb.run.changes[0]["options.seed"] == 7


@pytest.mark.parametrize("name", ls.loggers.LOGGER_NAMES)
def test_a_logger_is_created_by_name(name, wandb, mlflow, tmp_path):
    logger = ls.loggers.create_logger(name, tmp_path / "night")
    assert logger.package == name
    assert logger.run_folder == tmp_path / "night"
