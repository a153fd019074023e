"""What operators read and write, from their schemas."""

from __future__ import annotations

import pytest
import torch

from lockstep.audit.operator_schema import describe_operator, format_value

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("operator", "read", "written", "overwritten"),
    [
        (aten.mm.default, ["self", "mat2"], [], []),
        (aten.mm.out, ["self", "mat2"], [], ["out"]),
        (aten.add_.Tensor, ["self", "other"], ["self"], []),
        (aten.copy_.default, ["src"], [], ["self"]),
        (aten.bernoulli_.float, [], [], ["self"]),
        (aten.index_put_.default, ["self", "values"], ["self"], []),
        (aten._foreach_lerp_.Scalar, ["self", "tensors1"], ["self"], []),
        (aten.native_batch_norm.default, ["input", "running_mean"], ["running_mean"], []),
    ],
    ids=str,
)
def test_tensors_that_a_call_reads_and_writes(operator, read, written, overwritten):
    schema = describe_operator(operator)
    tensors = {name: torch.zeros(1) for name in {*read, *written, *overwritten}}
    names = {id(each): name for name, each in tensors.items()}
    given = {name: tensors[name] for name in schema.arguments if name in tensors}
    found = schema.tensors(schema.bind([], given))
    assert [[names[id(each)] for each in part] for part in found] == [read, written, overwritten]


def test_kinds_of_operators():
    names = [describe_operator(each).name for each in (aten.mm.default, aten.mm.out)]
    assert names == ["aten.mm", "aten.mm.out"]
    assert describe_operator(aten.t.default).is_view
    assert describe_operator(aten.squeeze_.default).is_view
    assert describe_operator(aten.detach.default).is_ignored
    constant = describe_operator(aten.lift_fresh.default)
    assert (constant.arguments, constant.is_view, constant.is_ignored) == ((), False, False)
    assert describe_operator(aten.multinomial.default).is_random
    assert describe_operator(torch.ops.c10d.allreduce_.default).is_asynchronous
    assert describe_operator(torch._higher_order_ops.wrap.inductor_compiled_code).is_opaque
    plain = describe_operator(aten.add.Tensor)
    assert (plain.is_view, plain.is_random, plain.written) == (False, False, ())


def test_arguments_as_text():
    schema = describe_operator(aten.sum.dim_IntList)
    values = schema.bind([torch.ones(2, 3), [1]], {"keepdim": True, "dtype": torch.float64})
    assert schema.format_arguments(values) == "dim=[1], keepdim=True, dtype=torch.float64"
    assert format_value(0.1) == "0.1"
    assert format_value([1.5, 2]) == "[1.5, 2]"
    assert format_value(object()) == ""
    assert format_value([torch.ones(1), torch.ones(1)]) == ""
