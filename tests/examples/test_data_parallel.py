"""One process per device and one process for all devices: one digest."""

import torch

import lockstep as ls
from examples import data_parallel


def test_both_ways_print_one_digest(capsys, monkeypatch):
    launch = ls.launch
    threads = torch.get_num_threads()
    monkeypatch.setattr(ls, "launch", lambda fn, **options: launch(fn, timeout=60, **options))
    try:
        data_parallel.main()
    finally:
        ls.shutdown()
        torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" digest ")[0].strip() for line in lines] == [
        "2 processes, 1 device each",
        "1 process, 2 devices",
    ]
    assert len({line.split(" digest ")[1].split()[0] for line in lines}) == 1
