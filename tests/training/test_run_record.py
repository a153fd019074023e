"""The folder of a run: which one a trainer gets, and which one it continues."""

import json
import shutil

import pytest

from lockstep.checkpoint.folder import MANIFEST
from lockstep.checkpoint.save_schedule import CheckpointConfig
from lockstep.kernel.errors import UsageError
from lockstep.launcher.run_folder import (
    CHECKPOINTS,
    RECORD_FILE,
    find_linked_runs,
    locate_renamed,
    remove_old_name,
)
from lockstep.record.reader import read_run
from lockstep.record.recorder import Recorder
from lockstep.tools.commands.runs import list_runs
from lockstep.training import run_record as module
from lockstep.training.run_record import RunRecord

CONFIG = CheckpointConfig()


@pytest.fixture(autouse=True)
def one_process(monkeypatch, tmp_path):
    """A process of its own, in a folder of its own."""
    monkeypatch.setattr(module, "_uses", module.Counter())
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def launch(monkeypatch, tmp_path):
    """The folder of a launch, as `lockstep run` gives it to its ranks."""
    folder = tmp_path / "runs" / "train-1"
    folder.mkdir(parents=True)
    (folder / "launch.json").touch()
    monkeypatch.setenv("LOCKSTEP_RUN", str(folder))
    return folder


class Run:
    """The run of one trainer: its folder, and its loggers once they are open."""

    def __init__(self, loggers=None, checkpoint=None):
        self.loggers = None
        self.folder = RunRecord(loggers, checkpoint, self.start)

    def start(self, loggers):
        self.loggers = loggers
        for each in loggers:
            each.write("run", environment={})

    @classmethod
    def begun(cls, *arguments):
        run = cls(*arguments)
        run.folder.begin()
        return run

    def end(self, state="done"):
        for each in self.loggers:
            each.write("end", state=state)
            each.close()

    @property
    def recorded(self):
        return [each.folder.name for each in self.loggers if isinstance(each, Recorder)]


def save_checkpoint(folder, step=1):
    (folder / CHECKPOINTS / f"step-{step}").mkdir(parents=True)
    (folder / CHECKPOINTS / f"step-{step}" / MANIFEST).touch()


def header(folder):
    return json.loads((folder / RECORD_FILE).read_text().splitlines()[0])


def test_a_second_run_of_a_name_gets_the_next_number(tmp_path, capfd):
    first = Run.begun("runs/mine")
    first.end()
    before = (tmp_path / "runs/mine" / RECORD_FILE).read_bytes()
    second = Run.begun(["runs/mine", "runs/too"])
    other = Run.begun("runs/own-2")
    third = Run.begun(tmp_path / "runs/mine")  # the second one still goes on
    fourth = Run.begun("runs/own")
    for each in (second, other, third, fourth):
        each.end()
    assert second.recorded == ["mine-2", "too"]
    assert (third.recorded, fourth.recorded) == (["mine-3"], ["own"])
    assert capfd.readouterr().err.splitlines() == [
        "lockstep: runs/mine holds an earlier run: this one is in runs/mine-2",
        "lockstep: runs/mine holds an earlier run: this one is in runs/mine-3",
    ]
    assert (tmp_path / "runs/mine" / RECORD_FILE).read_bytes() == before
    assert list(module._find_family(tmp_path / "runs/own")) == [1]


def test_by_default_only_what_has_a_folder_is_recorded(tmp_path):
    assert Run.begun().loggers == []
    assert not Run().folder.may_record
    assert list(tmp_path.iterdir()) == []
    run = Run.begun(None, CONFIG)
    run.end()
    assert read_run(run.folder.path).state == "done"
    assert run.folder.path.parent == tmp_path / "runs"
    assert Run.begun([], CONFIG).loggers == []


def test_the_first_trainer_of_a_launch_is_recorded_in_its_folder(launch, capfd):
    assert Run.begun([]).loggers == []
    judge = Run()
    generator = Run.begun(None, CONFIG)  # comes first, since it can be resumed
    judge.folder.begin()
    later = Run.begun(None, CONFIG)
    assert generator.recorded == ["train-1"]
    assert (judge.loggers, later.loggers) == ([], [])
    assert generator.folder.path == judge.folder.path == later.folder.path == launch
    assert (generator.folder.checkpoints, later.folder.checkpoints) == (
        CHECKPOINTS,
        f"{CHECKPOINTS}-2",
    )
    generator.end()
    assert capfd.readouterr().err == ""


def test_a_launch_gets_the_name_that_its_trainer_gives(launch, tmp_path):
    run = Run.begun("runs/mine")
    assert launch.is_symlink()
    assert (launch / "launch.json").exists()
    other = Run.begun("runs/other")
    assert header(tmp_path / "runs/other")["launch_folder"] == str(tmp_path / "runs/mine")
    assert (tmp_path / "runs/mine/other" / RECORD_FILE).exists()
    run.end()
    other.end()
    assert "launch_folder" not in header(tmp_path / "runs/mine")
    assert [each.name for each in list_runs(tmp_path / "runs")] == ["mine", "other"]
    assert locate_renamed(launch) == remove_old_name(launch) == tmp_path / "runs/mine"
    assert not launch.is_symlink()


def test_a_launch_that_cannot_be_renamed_keeps_its_folder(launch, tmp_path, monkeypatch):
    (tmp_path / "runs/mine").mkdir()
    (tmp_path / "runs/mine/notes.txt").touch()
    Run.begun("runs/mine").end()
    assert not launch.is_symlink()
    assert (launch / "mine" / "notes.txt").exists()
    assert header(tmp_path / "runs/mine")["launch_folder"] == str(launch)
    again = tmp_path / "runs" / "train-2"
    again.mkdir()
    monkeypatch.setenv("LOCKSTEP_RUN", str(again))
    run = Run("runs/mine", CONFIG)
    run.folder.select_resumed(None)
    assert list(again.iterdir()) == []  # it may be refused yet
    run.folder.open_resumed()
    run.end()
    assert find_linked_runs(again) == [tmp_path / "runs/mine"]


def test_a_launch_moved_elsewhere_is_still_found_where_it_was_to_be(launch, tmp_path):
    Run.begun("elsewhere/mine").end()
    assert remove_old_name(launch) == tmp_path / "elsewhere" / "mine"
    assert launch.is_symlink()
    assert [each.name for each in list_runs(tmp_path / "runs")] == ["train-1"]


def test_a_launch_that_has_the_name_already(launch, tmp_path, monkeypatch):
    Run.begun("runs/train-1").end()
    assert not launch.is_symlink()
    again = tmp_path / "runs" / "train-1-2"
    again.mkdir()
    (again / "launch.json").touch()
    monkeypatch.setenv("LOCKSTEP_RUN", str(again))
    run = Run.begun("runs/train-1")
    run.end()
    assert run.recorded == ["train-1-2"]


def test_resuming_continues_the_newest_run_of_the_name(tmp_path):
    for name in ("mine", "mine-2"):
        Run.begun("runs/mine", CONFIG).end("failed")
        save_checkpoint(tmp_path / "runs" / name)
    run = Run("runs/mine", CONFIG)
    assert run.folder.has_earlier_run
    run.folder.select_resumed(None)
    assert run.folder.path.name == "mine-2"
    assert (run.folder.checkpoints, run.loggers) == (CHECKPOINTS, None)
    run.folder.deselect()  # its settings differ
    run.folder.begin()
    run.end()
    assert run.recorded == ["mine-3"]
    for place in ("runs/mine", "runs/mine/checkpoints/step-1"):
        named = Run("runs/mine", CONFIG)
        named.folder.select_resumed(place)
        named.folder.open_resumed()
        named.end()
        assert (named.recorded, named.folder.checkpoints) == (["mine"], CHECKPOINTS)
    save_checkpoint(tmp_path / "elsewhere")
    run = Run("runs/mine", CONFIG)
    run.folder.select_resumed("elsewhere")
    run.end()
    assert run.recorded == ["mine-4"]


def test_a_second_trainer_of_a_notebook_continues_the_first(tmp_path):
    first = Run.begun("runs/mine", CONFIG)
    save_checkpoint(tmp_path / "runs/mine")
    second = Run("runs/mine", CONFIG)
    second.folder.select_resumed(None)
    second.folder.open_resumed()
    first.loggers[0].write("step", step=99)  # which no longer counts
    second.end()
    assert second.recorded == ["mine"]
    assert second.folder.checkpoints == CHECKPOINTS
    assert '"step":99' not in (tmp_path / "runs/mine" / RECORD_FILE).read_text()


def test_a_launch_that_resumes_continues_its_run(launch, tmp_path, monkeypatch):
    Run.begun("runs/mine", CONFIG).end("stopped")
    shutil.copytree(tmp_path / "runs/mine", tmp_path / "runs/mine-2")
    monkeypatch.setattr(module, "_uses", module.Counter())
    monkeypatch.setenv("LOCKSTEP_RUN", str(tmp_path / "runs/mine"))
    monkeypatch.setenv("LOCKSTEP_RESUME", "1")
    run = Run("runs/mine", CONFIG)
    next_one = Run("runs/mine", CONFIG)
    run.folder.select_launch()
    run.folder.open_resumed()
    run.end()
    assert run.recorded == ["mine"]
    assert '"resume' not in (tmp_path / "runs/mine" / RECORD_FILE).read_text()
    next_one.folder.select_launch()  # began after it in the interrupted run, too
    next_one.end()
    assert next_one.recorded == ["mine-3"]  # the copy says that it is the run of another name
    save_checkpoint(tmp_path / "runs/mine")
    monkeypatch.setattr(module, "_uses", module.Counter())
    anew = Run("runs/at-12-30", CONFIG)
    anew.folder.select_launch()
    assert anew.folder.path == tmp_path / "runs/mine"
    Run.begun("runs/mine").end()  # beside a trainer that resumes the run
    monkeypatch.setattr(module, "_uses", module.Counter())
    with pytest.raises(UsageError, match=r"mine is resumed, but its trainer has no checkpoints"):
        Run.begun("runs/mine")


def test_a_resumed_launch_without_a_name(launch, monkeypatch, capfd):
    judge = Run.begun()
    generator = Run.begun(None, CONFIG)
    judge.end()
    assert generator.loggers == []
    monkeypatch.setattr(module, "_uses", module.Counter())
    monkeypatch.setenv("LOCKSTEP_RESUME", "1")
    assert Run.begun().loggers == []
    assert (
        "it starts from the beginning, and is not recorded; pass checkpoint="
        in capfd.readouterr().err
    )
    again = Run(None, CONFIG)
    again.folder.select_launch()
    again.folder.open_resumed()
    assert again.loggers == []  # the record is that of the other trainer
    assert again.folder.path == launch
    (launch / RECORD_FILE).unlink()
    Run.begun(None, CONFIG).end()
    monkeypatch.setattr(module, "_uses", module.Counter())
    last = Run(None, CONFIG)
    last.folder.select_launch()
    last.folder.open_resumed()
    last.end()
    assert last.recorded == ["train-1"]


def test_a_recorder_of_the_users_keeps_its_folder(tmp_path, monkeypatch):
    Run.begun(Recorder(tmp_path / "run"), None).end()
    save_checkpoint(tmp_path / "run")
    with pytest.raises(UsageError, match="already holds the record"):
        Recorder(tmp_path / "run")
    with pytest.raises(UsageError, match=r"already holds a run: resume it with resume\(\)"):
        Run.begun(Recorder(tmp_path / "run", resume=True), CONFIG)
    monkeypatch.setenv("LOCKSTEP_RESUME", "1")
    with pytest.raises(UsageError, match=r"run is resumed, but its trainer has no checkpoints"):
        Run(Recorder(tmp_path / "run"))
    run = Run(Recorder(tmp_path / "run"), CONFIG)
    run.folder.select_launch()
    run.folder.open_resumed()
    run.end()
    assert run.folder.path == tmp_path / "run"
