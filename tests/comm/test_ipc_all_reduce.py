"""The reproducible all-reduce of ranks on one simulated device, which share its memory."""

import pytest
import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.comm.bucket import plan
from lockstep.comm.device_ipc import shares_device
from lockstep.comm.make_all_reduce import make_all_reduce
from lockstep.comm.reproducible_all_reduce import reproducible_all_reduce
from lockstep.launcher import world as joined
from simulated import ranks as simulated
from tree_sums import bits, expected_sums, leaf_values, sums_on_a_rank

DEVICE = "simulated:0"
CASES = [
    (3, torch.float64, 1 << 20, False),
    (1, torch.bfloat16, 1 << 20, True),
    (0, torch.float32, 300, True),
]
"""Leaves beside one per rank, dtype, bytes per bucket, whether some values are absent."""


@pytest.mark.parametrize("most", [4, pytest.param(8, marks=pytest.mark.stress)])
def test_the_sum_is_the_tree_bit_for_bit_on_every_number_of_ranks(most):
    def compare():
        device = joined.world().device
        wrong = []
        for ranks in range(2, dist.get_world_size() + 1):
            group = dist.new_group(range(ranks))
            if ls.rank() >= ranks:
                continue
            is_shared = shares_device(device, group)
            extra, dtype, capacity, is_absent = CASES[ranks % len(CASES)]
            leaves = ranks + extra
            sums = expected_sums(leaf_values(leaves, dtype, is_absent), leaves)
            expected = [bits(each) for each in sums]
            found = sums_on_a_rank(
                leaves,
                dtype,
                capacity,
                is_absent,
                device,
                group=group,
                is_device_shared=is_shared,
            )
            if not is_shared or found != [expected, expected]:
                wrong.append((ranks, leaves, dtype))
        return wrong

    assert simulated.run(compare, most, device=DEVICE) == [[]] * most


def make(is_shared, ranks=2):
    """Return a sum of three elements of one node per rank."""
    (bucket,) = plan([3], [torch.float32], 64)
    nodes = [[(rank, rank + 1)] for rank in range(ranks)]
    return make_all_reduce(bucket, nodes, ranks, joined.world().device, is_device_shared=is_shared)


def held(value):
    tensor = torch.full((3,), float(value), device=joined.world().device)
    return {(ls.rank(), ls.rank() + 1): [tensor]}


def test_a_rank_may_replace_its_memory_alone_and_unmaps_all_at_shutdown():
    def replace():
        from simulated import ipc

        found = shares_device(joined.world().device, None)
        first = make(found)
        seen = []
        for turn in range(4):
            if turn == ls.rank() + 1:
                first = make(found)
            ((_, total),) = reproducible_all_reduce([first], held(10 * turn + ls.rank()))
            seen.append(total.tolist())
        mapped = [ipc.count_mapped()]
        ls.shutdown()
        return seen, [*mapped, ipc.count_mapped()]

    expected = [[20.0 * turn + 1] * 3 for turn in range(4)]
    assert simulated.run(replace, 2, device=DEVICE) == [(expected, [2, 0])] * 2


def test_sums_that_are_copied_late_are_complete_before_their_memory_is_written_again():
    def overlap():
        device = joined.world().device
        reduction = make(shares_device(device, None))
        values = [held(10 * turn + ls.rank()) for turn in range(2)]
        seen = []
        torch.accelerator.synchronize(device)
        for turn in range(2):
            with torch.Stream(device):
                reduction.launch(values[turn])
                reduction.combine()
                reduction.sums = torch.empty_like(reduction.sums)
                ((_, total),) = reduction.gather()
                seen.append(total)
        torch.accelerator.synchronize(device)
        return [total.tolist() for total in seen]

    assert simulated.run(overlap, 2, device=DEVICE) == [[[1.0] * 3, [21.0] * 3]] * 2


def test_a_rank_that_left_is_an_error_for_those_that_wait():
    def leave():
        reduction = make(shares_device(joined.world().device, None))
        reduction.launch(held(1))
        if ls.rank() == 1:
            dist.destroy_process_group()
            return "left"
        with pytest.raises(RuntimeError, match=r"closed|reset"):
            reduction.combine()
        return "raised"

    assert simulated.run(leave, 2, device=DEVICE) == ["raised", "left"]


def test_ranks_that_cannot_map_the_memory_use_the_cpu(capfd):
    def fail():
        from simulated import ipc

        def refuse(*_):
            raise PermissionError("no such handle\nhere")

        if ls.rank() == 1:
            ipc.SimulatedIpc.open = refuse
        found = shares_device(joined.world().device, None)
        ((_, total),) = reproducible_all_reduce([make(found)], held(ls.rank()))
        return found, total.tolist()

    assert simulated.run(fail, 2, device=DEVICE) == [(False, [1.0] * 3)] * 2
    said = "rank 1 of the group could not share memory of the device: PermissionError: no such "
    assert capfd.readouterr().err.count(said) == 1


def test_ranks_on_several_devices_share_no_memory():
    def find():
        other = torch.device("simulated", ls.rank())
        return shares_device(other, None)

    assert simulated.run(find, 2, device=DEVICE) == [False] * 2
