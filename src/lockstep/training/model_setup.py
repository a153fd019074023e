"""The beginning: a trainer's model on this rank, with the blocks alive that are held here.

    a module             moved to the rank's device, and agreed on as it is
    a list of blocks     balance, or one block a stage?
                           yes   this rank's blocks come to life, the rest is on the meta device
                           no    all do, until the first batch has decided on the cut

Then every tensor's first holder gives it to the others that need it. Parameters that are
tied by their memory alone stay so only where all of them stay where they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from torch import nn

from lockstep.comm.transfer import all_gather_bytes
from lockstep.errors import DisagreementError, LayoutError, UsageError
from lockstep.model.agreement import give_weights
from lockstep.model.compilation import check_static
from lockstep.model.deferred_init import BlockLike, build, build_sequence
from lockstep.model.memory_overlap import overlaps_of_parameters
from lockstep.model.meta_device import moved
from lockstep.model.parallel_context import Setting
from lockstep.pipeline.cut import Blocks, block_names
from lockstep.pipeline.placement import Placement
from lockstep.pipeline.staging import Staging

__all__ = ["begun", "give_weights_to_all"]


def begun(
    model: nn.Module | Sequence[BlockLike],
    setting: Setting,
    seed: int,
    blocks: Blocks,
    schedule: str | None,
    balance: Sequence[int] | None,
    chunks: int | None,
) -> tuple[nn.Module, Staging]:
    """Return the model, with this rank's blocks at least, and what was asked about stages.

    Raises UsageError on every rank where a block cannot be built on one.
    """
    if not isinstance(model, nn.Module) and balance is None and len(model) == setting.stages > 1:
        balance = [1] * setting.stages
    if isinstance(model, nn.Module) or blocks is not None:
        whole = model if isinstance(model, nn.Module) else build(model, seed, setting.device)
        check_static(whole)
        whole = moved(whole, setting.device)
        # A compiled model is a wrapper, whose name is in front of every parameter's.
        names = [] if hasattr(whole, "_orig_mod") else block_names(whole, blocks)
        return whole, Staging.of(setting, whole, names, schedule, balance, chunks)
    numbers = [str(number) for number in range(len(model))]
    staging = Staging.of(setting, nn.Sequential(), numbers, schedule, balance, chunks)
    return _built(model, seed, staging), staging


def _built(blocks: Sequence[BlockLike], seed: int, staging: Staging) -> nn.Module:
    """Build this rank's blocks; where that fails on one rank, no other waits for it."""
    failure: Exception | None = None
    said = ""
    try:
        model = build_sequence(blocks, staging.held(), seed, staging.setting.device)
    except Exception as error:  # whatever it is, the other ranks wait for the outcome
        failure = error
        said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    everyone = all_gather_bytes(said.encode(), "building the blocks", staging.setting.group)
    if failure is not None:
        raise failure
    for rank, each in enumerate(everyone):
        if each:
            raise UsageError(
                f"stopped because rank {rank} could not build its blocks: {each.decode()}"
            )
    return model


def give_weights_to_all(
    module: nn.Module, setting: Setting, staging: Staging, shared: bool = False
) -> None:
    """Give this rank what it needs of the model, and of what else a step calls.

    Args:
        module: The model.
        setting: The layout.
        staging: How the model is cut into stages.
        shared: Whether the ranks will hold the parameters once.

    Raises:
        DisagreementError: Parameters have memory in common on some ranks only.
        LayoutError: Parameters have memory in common, which this layout does not keep.
    """
    given = staging.given() if setting.stages > 1 else None
    modules = setting.modules_with(module)
    for name, each in modules.items():
        moved(each, setting.device)
        if name or given is None:
            give_weights(each, setting.group, setting.device)
        else:
            placement = Placement.of(setting, given[0], module)
            give_weights(each, setting.group, setting.device, placement.here)
    _check_memory(modules, setting, shared)


def _check_memory(modules: Mapping[str, nn.Module], setting: Setting, shared: bool) -> None:
    """Refuse parameters that have memory in common where they would not keep it.

    An optimizer of whole parameters on every rank steps that memory once for each of them,
    with the same bits on any number of ranks.
    """
    pairs = overlaps_of_parameters(modules, attributes=shared)
    everyone = [
        [tuple(pair) for pair in json.loads(each)]
        for each in all_gather_bytes(
            json.dumps(pairs).encode(), "comparing the memory of parameters", setting.group
        )
    ]
    found = sorted({pair for each in everyone for pair in each})
    if not found:
        return
    first, second = found[0]
    if shared or setting.stages > 1:
        raise LayoutError(
            f"{first} and {second} are different tensors over the same memory, and would have "
            f"memory of their own with {'shared=True' if shared else f'stages={setting.stages}'}: "
            f"make them one parameter ({second} = {first}), or let one be a copy (.clone())"
        )
    for rank, theirs in enumerate(everyone):
        for first, second in [pair for pair in found if pair not in theirs]:
            other = next(r for r, each in enumerate(everyone) if (first, second) in each)
            raise DisagreementError(
                f"{first} and {second} lie in the same memory on rank {other} and not on rank "
                f"{rank}: build the model in the same way on every rank, or make them one "
                f"parameter ({second} = {first})"
            )
