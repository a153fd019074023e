"""The checks of the doctor, with good and bad environments."""

import subprocess
import sys

from lockstep.kernel.errors import RankError
from lockstep.tools.report import doctor
from lockstep.tools.report.checks import (
    Requirements,
    communication,
    good,
    machine,
    note,
)

TWO = Requirements(2, 1)


def only(check, requirements=TWO):
    (found,) = check(requirements)
    return found


def test_a_check_that_raises_has_a_bad_result(monkeypatch):
    def broken(requirements):
        yield good("before", "was fine")
        raise KeyError("oops")

    monkeypatch.setattr(doctor, "CHECKS", (broken, lambda requirements: [note("next", "x")]))
    found = list(doctor.run_checks(TWO))
    assert [one.verdict for one in found] == ["good", "bad", "note"]
    assert "the check failed with KeyError: 'oops'" in found[1].what


def test_variables_have_no_secrets(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("TORCH_TOKEN", "hush")
    listed = doctor.list_variables()
    assert "OMP_NUM_THREADS=3" in listed
    assert "hush" not in " ".join(listed)


def test_the_home_folder_is_hidden(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    assert doctor.hide_home("3.11 at /home/ada/python") == "3.11 at ~/python"


def test_two_ranks_all_reduce_with_gloo():
    found = communication.check_backend("gloo")
    assert found.verdict == "good"
    assert found.what.startswith("all-reduce on 2 ranks: 4 MiB in ")


def test_a_failing_backend_is_bad_with_its_reason(monkeypatch):
    def launch(*args, **options):
        raise RankError("rank 1 was killed by SIGKILL")

    monkeypatch.setattr("lockstep.launcher.launch.launch", launch)
    found = communication.check_backend("gloo")
    assert (found.verdict, found.what) == ("bad", "2 ranks fail: rank 1 was killed by SIGKILL")


def test_a_backend_with_wrong_results_is_bad(monkeypatch):
    monkeypatch.setattr("lockstep.launcher.launch.launch", lambda *a, **o: [(0, 0.1), (3, 0.1)])
    assert "3 elements are wrong" in communication.check_backend("gloo").what


def test_a_missing_fast_backend_is_noted_with_the_command_that_helps(monkeypatch):
    check = communication.check_native
    monkeypatch.setattr(communication.native, "reason_unavailable", lambda: None)
    found = only(check)
    assert (found.verdict, found.subject) == ("good", "backend")
    assert found.what == (
        "tensors on the CPU: runs use lockstep, because the ranks of a host share memory"
    )
    with monkeypatch.context() as context:
        context.setenv("LOCKSTEP_BACKEND", "gloo")
        what = "tensors on the CPU: runs use gloo, because LOCKSTEP_BACKEND selects it"
        assert only(check).what == what
    reason = "it was built for torch 2.12: run `lockstep build`"
    monkeypatch.setattr(communication.native, "reason_unavailable", lambda: reason)
    for why, words in ((None, ""), ("no compiler", "; the installation built none (no compiler)")):
        monkeypatch.setattr(communication, "read_installation_reason", lambda why=why: why)
        found = only(check)
        assert (found.verdict, found.advice) == ("note", "run `lockstep build`")
        assert found.what == (
            "tensors on the CPU: runs use gloo, which is many times slower than the backend "
            f"'lockstep'; that is not available here: it was built for torch 2.12{words}"
        )


def test_more_ranks_than_cores_are_noted():
    assert only(machine.check_cores, Requirements(1, 1)).verdict == "good"
    found = only(machine.check_cores, Requirements(4096, 2))
    assert found.verdict == "note"
    assert "4,096 ranks with 2 threads each need 8192" in found.what


def test_a_cpu_quota_limits_the_cores(monkeypatch, tmp_path):
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    found = only(machine.check_cores, Requirements(1, 1))
    assert found.verdict == "note"
    assert "limited to the time of 0.5 cores" in found.what


def test_too_little_memory_is_bad(monkeypatch, tmp_path):
    assert only(machine.check_memory, Requirements(1)).verdict == "good"
    assert only(machine.check_memory, Requirements(10**6)).verdict == "bad"
    (tmp_path / "memory.max").write_text("500000000\n")
    (tmp_path / "memory.current").write_text("300000000\n")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    found = only(machine.check_memory, Requirements(1))
    assert found.verdict == "bad"
    assert "200 MB left of the container's limit" in found.what


def test_versions(monkeypatch):
    assert only(machine.check_torch).verdict == "good"
    monkeypatch.setattr("torch.__version__", "2.4.1+cpu")
    assert only(machine.check_torch).verdict == "bad"
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "cannot be imported" in only(machine.check_torch).what


def test_a_torch_that_cannot_be_imported_is_a_result_and_no_traceback():
    code = "import sys; sys.modules['torch'] = None; "
    code += (
        "from lockstep.tools.report.checks.machine import check_torch; print(*check_torch(None))"
    )
    start = [sys.executable, "-c", code]
    done = subprocess.run(start, capture_output=True, text=True, check=True, timeout=60)
    assert "cannot be imported" in done.stdout


def test_an_nvidia_driver_without_cuda_torch_is_noted(monkeypatch, tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for cuda, words in [(None, "does not support CUDA"), ("12.8", "finds no GPU")]:
        monkeypatch.setattr("torch.version.cuda", cuda)
        found = only(machine.check_accelerators)
        assert (found.verdict, words in found.what) == ("note", True)
    monkeypatch.setenv("PATH", "")
    assert only(machine.check_accelerators).verdict == "good"
