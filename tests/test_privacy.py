"""What a run leaves behind: who can read it, and that no secret is in it."""

import contextlib
import json
import os
import stat
import sys

import pytest
from click.testing import CliRunner

import warm
from lockstep.cli import cli
from lockstep.record.run_environment import recorded_variables
from lockstep.tools.report import doctor
from lockstep.tools.report.checks import Requirements, good

TRAIN = """
import contextlib
import os
from functools import partial
from pathlib import Path
import torch
import lockstep as ls
from lockstep.record.recorder import Recorder

class Writer:
    def write(self, kind, /, **fields):
        with open("writer.txt", "a") as file:
            print(kind, fields, file=file)
    def close(self):
        pass

ls.init()
torch.manual_seed(1)
model, loss = torch.nn.Linear(4, 2), torch.nn.CrossEntropyLoss()
batch = torch.randn(8, 4), torch.arange(8) % 2
run = Path(os.environ["LOCKSTEP_RUN"])
print("a line for the log")
for process in Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError):
        shown = (process / "cmdline").read_bytes() + (process / "comm").read_bytes()
        assert b"planted0" not in shown, shown
        assert b"planted1" not in shown, shown
sgd = partial(torch.optim.SGD, lr=0.1)
options = {"api_key": "planted-option", "logger": [{"login": {"password": "planted-nested"}}]}
about = {"options": options, "data": "https://me:planted-url@host/data?sig=planted-query"}
loggers = ()
if ls.rank() == 0:
    loggers = [Recorder(run, about), ls.loggers.TensorBoard("tensorboard"), Writer()]
with ls.Trainer(model, loss, sgd, microbatches=2, loggers=loggers) as trainer:
    trainer.step(batch)
    trainer.save_weights(run / "weights.safetensors")
    try:
        trainer.step((batch[0] * float("nan"), batch[1]))
    except ls.LockstepError as error:
        assert "training stopped" in str(error)
        command = ["upload", "--token", "planted-message"]
        trainer.finish("failed", f"Command '{command}' failed after: {error}")
"""

ARGUMENTS = ["--api-key", "planted-argument", "--secret=planted-assignment", "key.token=planted-x"]
UNLISTED = {"LOCKSTEP_ANY": "planted-any", "TORCH_HOME": "planted-home"}
ENVIRONMENT = {
    "LOCKSTEP_DRIVER_KEY": "planted0" * 8,
    "LOCKSTEP_SECRET": "planted1" * 8,
    "HF_TOKEN": "planted-token",
    "NCCL_NET_PASSWORD": "planted-password",
    "NCCL_CONF_FILE": "https://me:planted-userinfo@host/nccl.conf",
    "OMP_NUM_THREADS": "1",
    "NCCL_DEBUG": "WARN",
}
FILES = {
    "launch.json", "run.lock", "rank-0.log", "rank-1.log", "record.jsonl",
    "weights.safetensors", "report.html", "sources",
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run that failed, made where new files are open to everybody."""
    place = tmp_path_factory.mktemp("place")
    (place / "train.py").write_text(TRAIN)
    program = "import os; os.umask(0); from lockstep.cli import main; main()"
    command = [sys.executable, "-c", program, "run", "-n", "2", "train.py", *ARGUMENTS]
    environ = os.environ | ENVIRONMENT | UNLISTED
    done = warm.run(command, cwd=place, env=environ, timeout=90, text=True)
    assert done.returncode == 0, done.stderr
    (run,) = (place / "runs").iterdir()
    shown = [
        ["report", run.name],
        ["compare", run.name, run.name],
        ["compare", run.name, run.name, "--json"],
        ["runs", "--json"],
    ]
    umask = os.umask(0)
    try:
        with contextlib.chdir(place):
            done = [
                CliRunner().invoke(cli, arguments, catch_exceptions=False) for arguments in shown
            ]
    finally:
        os.umask(umask)
    assert [each.exit_code for each in done] == [0] * len(done)
    (place / "printed.txt").write_text("".join(each.output for each in done))
    return place


def test_everything_that_a_run_writes_is_its_owners_alone(place):
    (run,) = (place / "runs").iterdir()
    assert {path.name for path in run.iterdir()} == FILES
    written = [place / "runs", *(place / "runs").rglob("*")]
    modes = {path: stat.S_IMODE(os.lstat(path).st_mode) for path in written}
    assert modes == {path: 0o700 if path.is_dir() else 0o600 for path in written}


def test_no_secret_is_in_anything_that_a_run_writes(place):
    (copy,) = place.glob("runs/*/sources/**/train.py")  # of the user's text, as it is
    assert copy.read_text() == TRAIN
    copy.unlink()
    (place / "train.py").unlink()
    contents = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert [str(path) for path, content in contents.items() if b"planted" in content] == []
    (record,) = place.glob("runs/*/record.jsonl")
    header = json.loads(contents[record].splitlines()[0])
    assert header["command"][-4:] == [
        "--api-key", "[redacted]", "--secret=[redacted]", "key.token=[redacted]",
    ]  # fmt: skip
    assert header["options"] == {
        "api_key": "[redacted]",
        "logger": [{"login": {"password": "[redacted]"}}],
    }
    assert header["environment"]["variables"]["NCCL_DEBUG"] == "WARN"
    assert b"failed after: " in contents[record].splitlines()[-1]
    assert b"[redacted]" in contents[place / "writer.txt"]


def test_the_doctor_redacts_secrets(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)

    def tell(requirements):
        yield good("proxy", "http://me:planted-url@proxy:8080")
        raise KeyError(os.environ["LOCKSTEP_DRIVER_KEY"])

    monkeypatch.setattr(doctor, "CHECKS", (tell,))
    found = list(doctor.run_checks(Requirements()))
    assert len(found) == 2
    text = str([found, *doctor.list_variables()])
    assert "planted" not in text
    assert "OMP_NUM_THREADS=1" in text


def test_only_variables_that_matter_are_recorded():
    assert recorded_variables(
        ENVIRONMENT | UNLISTED | {"CUDA_VISIBLE_DEVICES": "0", "HOME": "/"}
    ) == {
        "CUDA_VISIBLE_DEVICES": "0",
        "NCCL_DEBUG": "WARN",
        "NCCL_CONF_FILE": "https://[redacted]@host/nccl.conf",
        "NCCL_NET_PASSWORD": "[redacted]",
        "OMP_NUM_THREADS": "1",
    }
