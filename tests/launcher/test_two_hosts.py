"""Two hosts by hand: the commands of the page, and hosts that come late or never."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import hosts
import warm

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "two-hosts.md").read_text()
SCRIPT = re.search(r'```python title="train.py"\n(.*?)```', PAGE, re.DOTALL)[1]
COMMANDS = re.findall(r"^ *\$ lockstep (run .*--nnodes 2 .*train\.py.*)$", PAGE, re.MULTILINE)
WAIT = "import sys, lockstep\nlockstep.init(timeout=float(sys.argv[1]))\n"


def launch(host, command, folder):
    """Start a command of the page on a host, in a folder of its own."""
    where = folder / host.name
    where.mkdir(exist_ok=True)
    return host.popen(
        [*warm.LOCKSTEP, *shlex.split(command)],
        start=warm.Popen,
        cwd=where,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(*processes):
    """Return what each of them printed, and its exit status."""
    try:
        printed = [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(text, process.returncode) for text, process in zip(printed, processes, strict=True)]


def find_digests(text):
    return re.findall(r"\b[0-9a-f]{64}\b", text)


def write_scripts(folder, **scripts):
    for host in "ab":
        (folder / host).mkdir()
        for name, source in scripts.items():
            (folder / host / f"{name}.py").write_text(source)


def test_the_page_has_a_command_for_each_host():
    assert [re.search(r"--node-rank (\d)", each)[1] for each in COMMANDS] == ["0", "1"]


def test_the_commands_of_the_page_give_the_digest_of_one_host(tmp_path):
    write_scripts(tmp_path, train=SCRIPT)
    with hosts.network("a", "b") as net:
        first, second = COMMANDS
        on_a = launch(net["a"], first.replace("10.0.0.1", net["a"].address), tmp_path)
        on_b = launch(net["b"], second.replace("10.0.0.1", net["a"].address), tmp_path)
        (told_a, status_a), (told_b, status_b) = finish(on_a, on_b)
        assert (status_a, status_b) == (0, 0), told_a + told_b
        [(alone, status)] = finish(launch(net["a"], "run -n 1 train.py", tmp_path))
    assert status == 0
    assert find_digests(told_a) == find_digests(alone) != []
    assert not find_digests(told_b)
    logs = {path.name for path in (tmp_path / "b" / "runs").glob("*/rank-*.log")}
    assert logs == {"rank-2.log", "rank-3.log"}


def test_a_missing_host_is_named_by_one_rank_and_ends_the_run_on_every_host(tmp_path):
    write_scripts(tmp_path, wait=WAIT)
    three = "run -n 2 --nnodes 3 --node-rank {} --master-addr {} wait.py {}"
    with hosts.network("a", "b") as net:
        address = net["a"].address
        # Host b would wait for a minute longer: it ends because host a gives up.
        on_a = launch(net["a"], three.format(0, address, 4), tmp_path)
        on_b = launch(net["b"], three.format(1, address, 64), tmp_path)
        (told_a, status_a), (told_b, status_b) = finish(on_a, on_b)
    assert (status_a, status_b) == (1, 1), told_a + told_b
    advice = f"lockstep run was started there with --node-rank 2 and can reach {address}:29500"
    notes = re.findall(r"^.*has waited.*$", told_a + told_b, re.MULTILINE)
    assert len(notes) == 1, notes
    assert notes[0].startswith("[0] lockstep: rank 0 has waited 3 s (since ")
    assert "for host 2 (ranks 4 and 5 of 6), and waits 1 s more; check that" in notes[0]
    assert advice in notes[0]
    for told in (told_a, told_b):
        errors = re.findall(r"^lockstep: wait.py:2: .*$", told, re.MULTILINE)
        assert len(errors) == 1, told
        assert "host 2 (ranks 4 and 5 of 6) did not join within 4 s, while the others" in errors[0]
        assert advice in errors[0]


def test_a_missing_store_is_reported_by_one_rank_of_each_host(tmp_path):
    write_scripts(tmp_path, wait=WAIT)
    with hosts.network("a", "b") as net:
        where = f"--master-addr {net['a'].address}"
        on_b = launch(net["b"], f"run -n 2 --nnodes 2 --node-rank 1 {where} wait.py 4", tmp_path)
        [(told, status)] = finish(on_b)
    assert status == 1
    assert len(re.findall(r"^\[\d\] lockstep: rank 2: no answer from", told, re.MULTILINE)) == 1
    assert "[3]" not in told
    assert "ranks 2 and 3 raised this" in told
