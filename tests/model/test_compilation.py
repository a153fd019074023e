"""Compiled models: one digest in every layout, also where micro-batches differ in size."""

import os
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.kernel.errors import LayoutError, RankError, UsageError
from lockstep.model.compilation import (
    check_blocks_of,
    check_compilation,
    count_compiled,
    describe_compilation,
)

SGD = partial(torch.optim.SGD, lr=0.1)

imports_inductor = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")


def compiler(graph, inputs):
    """Return a graph whose bits depend on whether it was made for several sizes, as kernels do."""
    symbolic = any(isinstance(each, torch.SymInt) for each in inputs)
    return lambda *values: [each * (1.001 if symbolic else 1.0) for each in graph(*values)]


class Block(nn.Module):
    """A block with random numbers and a buffer that it writes."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.norm = nn.BatchNorm1d(outputs)

    def forward(self, inputs):
        return F.dropout(self.norm(self.linear(inputs)).tanh(), 0.3)


def train_blocks(compiled, stages=1, checkpointing=False, compiler=compiler, **options):
    """Return the digest of a model of three blocks after two steps with several sizes."""
    torch.compiler.reset()
    torch.manual_seed(1)
    model = nn.Sequential(Block(6, 9), Block(9, 8), Block(8, 4))
    if compiled == "whole":
        model = torch.compile(model, backend=compiler)
    elif compiled == "whole in place":
        model.compile(backend=compiler)
    elif compiled == "blocks":
        model[0].compile(backend=compiler)
        model[1].compile(backend=compiler)
        model[2].norm.compile(backend=compiler)
    trainer = ls.Trainer(
        model,
        F.cross_entropy,
        SGD,
        microbatches=4,
        pipeline=ls.PipelineConfig(stages=stages),
        activation_checkpointing=checkpointing,
        progress=False,
        **options,
    )
    for _ in range(2):
        trainer.step((torch.randn(22, 6), torch.randint(0, 4, (22,))))
    return trainer.digest()


def train(sizes, compiled, outside=()):
    """Return what a training computes in which rank 0 calls the model between steps."""
    torch.compiler.reset()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
    if compiled == "in place":
        model[0].compile(backend=compiler)
    elif compiled == "whole":
        model = torch.compile(model, backend=compiler)
    trainer = ls.Trainer(model, F.cross_entropy, SGD, microbatches=4)
    for size in sizes:
        if ls.rank() == 0:
            for samples in outside:
                model(torch.ones(samples, 6))
        trainer.step((torch.randn(size, 6), torch.randint(0, 4, (size,))))
    data = torch.utils.data.TensorDataset(torch.randn(21, 6), torch.randint(0, 4, (21,)))
    loss = trainer.evaluate(data, 13).loss
    config = sys.modules.get("torch._dynamo.config")
    kept = config is None or (
        config.automatic_dynamic_shapes and not config.fail_on_recompile_limit_hit
    )
    return trainer.digest(), loss, kept


def test_uneven_micro_batches_have_the_same_bits_in_every_layout(ranks):
    """Which size a rank saw first decided which graph was specialized for it."""

    def train_both():
        return train((22, 14), "whole"), train((22, 14), "in place")

    (plain,) = ranks(train, 1, (22, 14), "")
    found = [each for n in (1, 3) for each in ranks(train_both, n)]
    assert found == [(plain, plain)] * 4


def test_calls_of_one_rank_between_steps_change_no_bit(ranks):
    """Its graph for several sizes would otherwise serve the micro-batches of this rank, too."""
    plain = ranks(train, 1, (22, 14), "")
    assert ranks(train, 2, (22, 14), "whole", (3, 4)) == plain * 2


def test_compiled_blocks_have_the_same_bits_in_every_layout(ranks):
    def train_alone():
        plain = train_blocks(""), train_blocks("blocks"), train_blocks("blocks", checkpointing=True)
        return {*plain}, {train_blocks("whole"), train_blocks("whole in place")}

    def train_together():
        split = train_blocks("blocks", stages=2, checkpointing=True)
        return {split, train_blocks("blocks")}, {train_blocks("whole in place")}

    (alone,) = ranks(train_alone, 1)
    together = ranks(train_together, 2)
    assert [len(each) for each in alone] == [1, 1], "blocks have seeds of their own; a model one"
    assert together == [alone, alone]


@pytest.mark.stress
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("compiled", ["blocks", "whole in place"])
def test_inductor_has_the_same_bits_in_every_layout(ranks, tmp_path, compiled):
    """Ranks that compile at the same time, an empty and a full cache, and another run."""

    def train_with(cache, **options):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / cache)
        return train_blocks(compiled, compiler="inductor", **options)

    def train_in(n, cache, **options):
        return ranks(partial(train_with, cache, **options), n, timeout=900.0)

    found = {*train_in(2, "first"), *train_in(1, "first"), *train_in(3, "first")}
    found |= {*train_in(2, "first", storage="shared"), *train_in(1, "second")}
    if compiled == "blocks":
        found |= {*train_in(1, "first", checkpointing=True)}
        found |= {*train_in(2, "second", stages=2, checkpointing=True)}
    assert len(found) == 1
    half = {"autocast_dtype": torch.bfloat16}
    assert len({*train_in(1, "first", **half), *train_in(2, "first", **half)}) == 1


@pytest.mark.parametrize("in_place", [False, True])
def test_dynamic_graphs_are_refused_by_name(in_place):
    part = nn.Linear(6, 9)
    if in_place:
        part.compile(dynamic=True, backend=compiler)
    else:
        part = torch.compile(part, dynamic=True, backend=compiler)
    with pytest.raises(UsageError, match="0 is compiled with dynamic=True"):
        check_compilation(nn.Sequential(part))
    static = torch.compile(nn.Linear(6, 9), dynamic=False, backend=compiler)
    check_compilation(nn.Sequential(static))


@imports_inductor
def test_kernels_chosen_by_speed_are_refused_by_name():
    model = torch.compile(nn.Sequential(nn.Linear(6, 9)), options={"deterministic": False})
    with pytest.raises(UsageError, match=r"the model is compiled with .*'deterministic'"):
        check_compilation(model)
    check_compilation(torch.compile(model._orig_mod, options={"max_autotune": True}))


def test_a_part_of_a_compiled_module_is_no_block():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    model[1].compile(backend=compiler)
    check_blocks_of(model, ["0", "1"])
    with pytest.raises(LayoutError, match=r"block 1\.0 is a part of 1, which is compiled"):
        check_blocks_of(model, ["0", "1.0", "1.1"])
    model[1] = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend=compiler)
    with pytest.raises(LayoutError, match=r"block 1\.0 is a part of 1, which is compiled"):
        check_blocks_of(model, ["1._orig_mod.0"])


def test_modules_are_counted_where_they_are_compiled():
    assert count_compiled(nn.Sequential(nn.Linear(2, 2))) == 0
    block = nn.Sequential(Block(2, 2), Block(2, 2))
    block.compile(backend=compiler)
    assert count_compiled(nn.Sequential(block, block)) == 2
    assert count_compiled(torch.compile(Block(2, 2), backend=compiler)) == 1


def test_ranks_that_compile_differently_are_an_error_that_names_the_module(ranks):
    def build():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].compile(backend="aot_eager" if ls.rank() else "eager")
        ls.Trainer(model, F.cross_entropy, SGD)

    with pytest.raises(RankError, match=r"rank 1: torch\.compile\(1\) is .*aot_eager"):
        ranks(build, 2)


@imports_inductor
def test_the_description_has_the_options():
    assert describe_compilation(nn.Linear(2, 2)) == {}
    model = torch.compile(nn.Linear(2, 2), options={"max_autotune": True}, fullgraph=True)
    found = describe_compilation(model)
    assert found == {"torch.compile(model)": "inductor, max_autotune=True, fullgraph=True"}
