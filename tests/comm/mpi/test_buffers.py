"""Which tensors of a call may be passed to MPI as they are."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.mpi.buffers import Buffers, extent, find_overlaps

EXTENTS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 6)).map(lambda x: (x[0], x[0] + x[1])), max_size=6
)


def overlap(a, b):
    return max(a[0], b[0]) < min(a[1], b[1])


@given(EXTENTS, EXTENTS)
def test_find_overlaps_compares_every_pair(inputs, outputs):
    found_inputs, found_outputs = find_overlaps(inputs, outputs)
    assert found_inputs == {
        n for n, each in enumerate(inputs) if any(overlap(each, out) for out in outputs)
    }
    assert found_outputs == {
        n
        for n, each in enumerate(outputs)
        if any(overlap(each, out) for m, out in enumerate(outputs) if m != n)
    }


def test_contiguous_tensors_are_passed_without_copies():
    given, output = torch.arange(6.0), torch.empty(2, 3)
    buffers = Buffers([given], [output])
    assert buffers.sources[0].data_ptr() == given.data_ptr()
    assert buffers.targets[0] is output


def test_input_that_is_an_output_is_copied_first():
    tensor = torch.arange(6.0)
    buffers = Buffers([tensor[2:4]], [tensor])
    buffers.targets[0].zero_()
    assert buffers.sources[0].tolist() == [2.0, 3.0]


def test_last_of_overlapping_outputs_wins():
    tensor = torch.zeros(3)
    buffers = Buffers([], [tensor[:2], tensor[1:]])
    for number, target in enumerate(buffers.targets):
        target.fill_(number + 1)
    buffers.copy_back()
    assert tensor.tolist() == [1.0, 2.0, 2.0]


def test_output_with_gaps_is_written_in_its_own_order():
    tensor = torch.zeros(4)
    buffers = Buffers([], [tensor[::2]], in_place=True)
    assert buffers.targets[0].is_contiguous()
    buffers.targets[0].copy_(torch.tensor([1.0, 2.0]))
    buffers.copy_back()
    assert tensor.tolist() == [1.0, 0.0, 2.0, 0.0]


def test_conjugate_is_resolved():
    values = torch.tensor([1 + 2j]).conj()
    assert torch.view_as_real(Buffers([values], [torch.empty(1)]).sources[0]).tolist() == [[1, -2]]


def test_extent_of_a_view_ends_with_its_last_element():
    base = torch.zeros(4, 5)
    view = base[1:3, ::2]
    start, stop = extent(view)
    assert (start - base.data_ptr(), stop - base.data_ptr()) == (5 * 4, 15 * 4)
