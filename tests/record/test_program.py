"""What a record says of the program: what was run, and from where."""

import json
import os
import subprocess
import sys
from pathlib import Path

import lockstep
from lockstep.launcher import world
from lockstep.launcher.launch import launch
from lockstep.record.program import describe_program, select_variables

PRINT = """
import json
from lockstep.record.program import describe_program
print(json.dumps(describe_program()))
"""


def run(folder, *words, stdin=None):
    """Run the interpreter in a folder; return what it prints as JSON."""
    package = str(Path(lockstep.__file__).parents[1])
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([package, str(folder / "library")])}
    environ |= {"OMP_NUM_THREADS": "3", "HOME_MADE": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environ, input=stdin, text=True,
        capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def test_a_program_is_described_as_it_was_started(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (tmp_path / "library").mkdir()
    for path in (tmp_path / "train.py", package / "__main__.py", package / "train.py"):
        path.write_text(PRINT)
    started = {
        ("script", str(tmp_path / "train.py")): ["train.py"],
        ("script", str(package)): ["package"],
        ("module", "package"): ["-m", "package"],
        ("module", "package.train"): ["-m", "package.train"],
        ("command", ""): ["-c", PRINT],
    }
    for (kind, target), words in started.items():
        found = run(tmp_path, *words, "--lr", "0.1")
        assert (found["kind"], found["target"]) == (kind, target)
        assert found["arguments"] == ["--lr", "0.1"]
        assert found["cwd"] == str(tmp_path)
        assert found["environ"]["OMP_NUM_THREADS"] == "3"
        assert "HOME_MADE" not in found["environ"]
        own = str(package) if target == str(package) else str(tmp_path)
        assert found["path"][:2] == [own, str(tmp_path / "library")]
    assert run(tmp_path, "-", stdin=PRINT)["kind"] == "command"


def test_a_launch_knows_where_it_was_started_and_what_it_runs(tmp_path):
    (tmp_path / "train.py").write_text(f"import os\nos.chdir('/')\n{PRINT}")
    command = ["-m", "lockstep", "run", "-n", "1", "train.py", "--lr", "0.1"]
    found = run(tmp_path, *command)
    assert (found["kind"], found["target"]) == ("script", str(tmp_path / "train.py"))
    assert (found["arguments"], found["cwd"]) == (["--lr", "0.1"], str(tmp_path))


def test_a_function_of_a_launch_names_its_script(ranks):
    found, _ = ranks(describe_program, 2)
    assert (found["kind"], found["target"]) == ("function", sys.argv[0])
    first, second = (launch(describe_program)[0]["launch"] for _ in range(2))
    assert second == first + 1
    assert "launch" not in describe_program()
    assert describe_program("recipe", "digits")["target"] == "digits"


def test_a_worker_executes_the_calls_of_a_driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "lockstep.tools.remote.worker", sys)
    assert describe_program()["kind"] == "driver"


def test_variables_that_init_sets_are_not_those_of_the_user(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert describe_program()["environ"]["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    monkeypatch.setattr(world, "_variables_set", ["CUBLAS_WORKSPACE_CONFIG"])
    assert "CUBLAS_WORKSPACE_CONFIG" not in describe_program()["environ"]


def test_variables_are_those_that_decide_bits():
    given = {"MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "SSE41", "NCCL_DEBUG": "INFO", "PATH": "/"}
    assert select_variables(given) == {"MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "SSE41"}
