"""The faults that tests inject are where they were asked for, and nowhere else."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch import nn

import lockstep as ls
from bit_flips import (
    FaultyOperator,
    FaultyReduction,
    find_core,
    flip_bit,
    flip_bit_in_file,
)

BATCH = torch.linspace(-1, 1, 48).view(8, 6), torch.arange(8) % 4


def find_differences(a: torch.Tensor, b: torch.Tensor) -> list[int]:
    """Return the numbers of the elements whose bits differ."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    ours, theirs = (each.detach().clone().view(kinds[each.itemsize]) for each in (a, b))
    return (ours != theirs).flatten().nonzero().flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_a_bit_in_memory(dtype):
    tensor = torch.arange(24).view(2, 3, 4).to(dtype).permute(2, 0, 1)[1:]  # has gaps
    before = tensor.clone()
    version = tensor._version
    for bit in (0, 8 * dtype.itemsize - 1):
        flip_bit(tensor, 7, bit)
        assert find_differences(before, tensor) == [7]
        assert tensor._version == version
        flip_bit(tensor, 7, bit)
        assert find_differences(before, tensor) == []
    with pytest.raises(AssertionError, match="element 18 of"):
        flip_bit(tensor, 18, 0)


def test_a_bit_of_a_file(tmp_path):
    file = tmp_path / "state"
    file.write_bytes(b"abc")
    flip_bit_in_file(file, 1, 1)
    flip_bit_in_file(file, -1)
    assert file.read_bytes() == b"a`b"


def compute(layer: nn.Module) -> list[torch.Tensor]:
    """Return an output, a gradient and an updated weight."""
    layer.zero_grad()
    output = layer(BATCH[0])
    output.square().mean().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    return [each.clone() for each in (output, layer.weight.grad, layer.weight)]


def make_layer() -> nn.Linear:
    return torch.manual_seed(1) and nn.Linear(6, 4)


@pytest.mark.parametrize(
    ("operator", "phase", "right"),
    [("addmm", "forward", 0), ("mm", "backward", 1), ("add_.Tensor", "optimizer", 2)],
)
def test_a_result_of_each_phase_is_wrong_and_what_came_before_it_is_not(operator, phase, right):
    undisturbed = compute(make_layer())
    with FaultyOperator(operator, phase=phase, call=0, element=3, rank=0) as fault:
        disturbed = compute(make_layer())
    assert (fault.flips, fault.calls) == (1, 2 if phase == "optimizer" else 1)
    counts = [len(find_differences(*pair)) for pair in zip(undisturbed, disturbed, strict=True)]
    assert counts[: right + 1] == [0] * right + [1]
    others = {"forward", "backward", "optimizer"} - {phase}
    for other in sorted(others):
        with FaultyOperator(operator, phase=other) as fault:
            assert all(map(torch.equal, compute(make_layer()), undisturbed))
        assert fault.flips == 0
    assert all(map(torch.equal, compute(make_layer()), undisturbed))


def test_calls_of_another_thread_and_of_in_place_and_several_results():
    results = list[torch.Tensor]()
    tensor = torch.ones(4)
    with FaultyOperator("mul_.Tensor", element=2) as fault:
        thread = threading.Thread(target=lambda: results.append(tensor.mul_(2)))
        thread.start()
        thread.join()
    assert results[0] is tensor
    assert (tensor == 2).tolist() == [True, True, False, True]
    assert fault.flips == 1
    with FaultyOperator("native_layer_norm", output=1, element=0):
        outputs = torch.native_layer_norm(BATCH[0], [6], None, None, 1e-5)
    expected = torch.native_layer_norm(BATCH[0], [6], None, None, 1e-5)
    differences = list(map(find_differences, outputs, expected))
    assert differences == [[], [0], []]


def test_some_calls_and_some_values():
    def count(**chosen):
        with FaultyOperator("mul.Tensor", **chosen) as fault:
            wrong = [number for number in range(200) if torch.ones(1).mul(2) != 2]
        assert (fault.calls, fault.flips) == (200, len(wrong))
        return wrong

    assert count(call=17) == [17]
    some = count(probability=0.1, seed=3)
    assert some == count(probability=0.1, seed=3)
    assert some != count(probability=0.1, seed=4)
    assert 5 < len(some) < 40
    with FaultyOperator("mul.Tensor", above=2.5) as fault:
        result = torch.arange(-4.0, 4.0).mul(1)
    assert find_differences(result, torch.arange(-4.0, 4.0)) == [0, 1, 7]
    assert fault.flips == 3


def test_one_core():
    cores = os.sched_getaffinity(0)
    try:
        for core in sorted(cores)[:2]:
            os.sched_setaffinity(0, {core})
            assert find_core() == core
            for wrong in sorted(cores)[:2]:
                with FaultyOperator("neg", cores={wrong}) as fault:
                    torch.ones(2).neg()
                assert fault.flips == (wrong == core)
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.ranks(2)
def test_one_rank(world):
    with FaultyOperator("neg", rank=1, element=0):
        right = (torch.ones(2).neg() == -1).tolist()
    assert right == [ls.rank() != 1, True]


@pytest.mark.usefixtures("world_of_one")
def test_a_gradient_after_the_sum():
    def train(parameter="weight", **chosen):
        layer = make_layer()
        with ls.Trainer(layer, nn.CrossEntropyLoss(), torch.optim.SGD) as trainer:
            with FaultyReduction(layer.get_parameter(parameter), **chosen) as fault:
                trainer.step(BATCH)
            weight = layer.weight.clone()
            trainer.step(BATCH)
        assert fault.flips == fault.calls == (0 if chosen.get("rank") else 1)
        return weight

    undisturbed = train(rank=1)
    assert find_differences(train(element=5), undisturbed) == [5]
    assert find_differences(train("bias", element=3), undisturbed) == []
