"""The memory of a rank in each storage, and the bytes that ranks exchange per step.

    replicated        parameters, optimizer state and gradients are whole on every rank
    shared            one copy of parameters and optimizer state on the host
    sharded           every rank has a part of all three, and gathers a block while it computes
    hybrid            the same among the ranks of each host, which have a copy of all three
    stages            every rank has all three of its blocks

Gradients are lists of the gradients of all parameters. A rank holds one list for the micro-batch
that it computes, one for each node of the tree that waits for its sibling, and, with several
ranks, one for each node in the buckets that ranks add. The functions are pure and do not depend on
processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any

from lockstep.comm.hosts.map import HostMap, find_host_nodes
from lockstep.data.assignment import assign_microbatches, assign_nodes
from lockstep.kernel.tree import TreeAccumulator
from lockstep.pipeline.schedule_planner import partition_blocks

__all__ = ["StoragePlan", "TrainingMemory", "choose", "count_sums", "plan_storages"]


@dataclass(frozen=True)
class TrainingMemory:
    """The memory of a training on one rank, in bytes.

    Attributes:
        parameters: All parameters.
        gradients: The gradients of the trainable parameters.
        optimizer: The state of the optimizer.
        activations: The tensors of a micro-batch, beyond its gradients.
        unused: Workspaces of kernels, and memory that the allocator has and cannot use.
        process: The interpreter, libraries, data and buffers: everything else.
        shared: The pages of the interpreter and libraries that a rank shares with the other ranks
            of its host, and with the fork server that started them.
        leaves: The number of micro-batches of a batch.
        refusals: Why the training cannot use "shared" or "sharded" storage; without what it can.
        blocks: The bytes of the parameters of each block; empty if the model has no blocks.
        outputs: The bytes of a micro-batch's output of each block.
        is_computed: Whether the values were computed without memory, so that `unused` is not
            known.
        is_exact: Whether it is a loop with `ls.exact`.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    unused: int
    process: int
    shared: int
    leaves: int
    refusals: Mapping[str, str] = field(default_factory=dict)
    blocks: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    is_computed: bool = False
    is_exact: bool = False


@dataclass(frozen=True)
class StoragePlan:
    """The plan of one storage: bytes of the rank that holds most, and bytes exchanged per step.

    Attributes:
        storage: "replicated", "shared", "hybrid" or "sharded".
        balance: The number of blocks of each stage; empty without stages.
        refusal: The reason why the training cannot use this storage; "" if it can. The other
            values are 0 then.
        parameters: The parameters, as this rank's part of memory that ranks share.
        gradients: All lists of gradients.
        optimizer: The state of the optimizer.
        activations: As in `TrainingMemory`, with unused memory.
        process: Everything else, with this rank's part of the pages that it shares.
        ranks_per_host: The number of ranks on a host.
        local: The bytes that the ranks of a host exchange per step in its memory.
        network: The bytes that the host that sends most sends per step to other hosts.
    """

    storage: str
    balance: tuple[int, ...] = ()
    refusal: str = ""
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    process: int = 0
    ranks_per_host: int = 1
    local: int = 0
    network: int = 0

    @property
    def rank(self) -> int:
        """The bytes of a rank."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.process

    @property
    def host(self) -> int:
        """The bytes of the ranks of a host together."""
        return self.rank * self.ranks_per_host

    @property
    def argument(self) -> str:
        """The argument of `ls.Trainer` that chooses the storage."""
        if self.balance:
            return f"pipeline=ls.PipelineConfig({len(self.balance)}, balance={[*self.balance]})"
        return f'storage="{self.storage}"'

    def fits(self, memory: float) -> bool:
        """Return whether the training can use the storage on hosts of so many bytes."""
        return not self.refusal and self.host <= memory


def plan_storages(training: TrainingMemory, hosts: int, ranks: int) -> list[StoragePlan]:
    """Return the plan of each storage.

    Args:
        training: The memory of the training on one rank.
        hosts: The number of hosts.
        ranks: The number of ranks on all hosts together, a multiple of `hosts`.
    """
    per_host = ranks // hosts
    homes = [rank // per_host for rank in range(ranks)]
    whole = (training.parameters, training.gradients, training.optimizer)
    leaves = training.leaves

    def make(
        storage: str, homes: Sequence[int], sizes: tuple[int, int, int], **rest: Any
    ) -> StoragePlan:
        """Return a plan of replicas on the given hosts."""
        if not rest.get("refusal") and len(homes) > leaves:
            rest["refusal"] = f"{len(homes)} replicas cannot share {leaves} micro-batches"
        if rest.get("refusal"):
            return StoragePlan(storage, rest.get("balance", ()), rest["refusal"])
        lists, buckets = _count_lists(leaves, _group(homes))
        # What the allocator cannot use lies between the tensors that outlive a micro-batch:
        # parameters, and lists of gradients.
        unused = training.unused * (1 + lists) // (1 + count_sums(range(leaves), leaves))
        return StoragePlan(
            storage=storage,
            parameters=sizes[0],
            gradients=sizes[1] * (lists + buckets),
            optimizer=sizes[2],
            activations=training.activations + unused,
            process=training.process + training.shared // (per_host + 1),
            ranks_per_host=per_host,
            **rest,
        )

    local, network = _count_traffic(leaves, _group(homes), training.gradients)
    plans = [make("replicated", homes, whole, local=local, network=network)]
    local, _ = _count_traffic(leaves, _group(homes), training.gradients, scatter=True)
    refusal = "all ranks must be on one host" if hosts > 1 else training.refusals.get("shared", "")
    parts = -(-whole[0] // ranks), whole[1], -(-whole[2] // ranks)
    plans.append(make("shared", homes, parts, local=local, refusal=refusal))
    if 1 < hosts < ranks:  # otherwise like another storage
        plans.append(_plan_sharded(training, hosts, per_host, "hybrid"))
    plans.append(_plan_sharded(training, hosts, per_host, "sharded"))
    for stages in range(2, min(len(training.blocks), ranks) + 1):
        if ranks % stages == 0:
            balance = tuple(map(len, partition_blocks(training.blocks, (), stages)))
            sizes = _sum_stages(training, balance)
            local, network = _count_stage_traffic(training, balance, sizes, homes)
            share = max(sizes) / max(training.parameters, 1)
            parts = max(sizes), round(whole[1] * share), round(whole[2] * share)
            own = {"balance": balance, "local": local, "network": network}
            plans.append(make("replicated", homes[::stages], parts, **own))
    return plans


def choose(plans: Sequence[StoragePlan], memory: float) -> StoragePlan | None:
    """Return the first plan that fits on hosts of so many bytes; None if there is none."""
    return next((plan for plan in plans if plan.fits(memory)), None)


def count_sums(span: range, leaves: int) -> int:
    """Return the most lists of gradients that a rank holds while it computes micro-batches.

    Args:
        span: The micro-batches of the rank.
        leaves: The number of micro-batches of a batch.
    """
    sums = TreeAccumulator[None](leaves, lambda left, right: None)
    most = 0
    for leaf in span:
        most = max(most, len(sums.nodes) + 1)
        sums.put((leaf, leaf + 1), None)
    return most


def _plan_sharded(training: TrainingMemory, hosts: int, per_host: int, storage: str) -> StoragePlan:
    """Return the plan of parameters, gradients and optimizer state divided over ranks."""
    leaves = training.leaves
    ranks = hosts * per_host
    shards, copies = (per_host, hosts) if storage == "hybrid" else (ranks, 1)
    if ranks & (ranks - 1) or leaves % ranks:
        reason = f"the number of ranks must be a power of two that divides {leaves} micro-batches"
        return StoragePlan(storage, refusal=reason)
    if reason := training.refusals.get("sharded", ""):
        return StoragePlan(storage, refusal=reason)
    turns = leaves // ranks
    sums = leaves // shards
    lists = count_sums(range(turns), sums)
    homes = _group(range(copies))
    buckets = len(assign_nodes(sums, homes)[0]) if copies > 1 else 0
    _, between = _count_traffic(sums, homes, -(-training.gradients // shards))
    rest = training.parameters - sum(training.blocks)
    unit = max(rest, *training.blocks, 0)
    # Gathered are the parameters outside of the blocks, and those of two blocks, with the buffers
    # in which they arrive; of a unit there are the gradients, those that are sent, and those that
    # are received. The allocator keeps nothing unused (`return_large_blocks`).
    gathered = min(rest + 4 * max(training.blocks, default=0), training.parameters)
    scattered = 3 * unit * training.gradients // max(training.parameters, 1)
    # In each turn, parameters are gathered twice, and gradients scattered once.
    sent = turns * per_host * (2 * training.parameters + training.gradients) // shards
    return StoragePlan(
        storage=storage,
        parameters=-(-training.parameters // shards) + gathered,
        gradients=-(-training.gradients * (lists + buckets) // shards) + scattered,
        optimizer=-(-training.optimizer // shards),
        activations=training.activations,
        process=training.process + training.shared // (per_host + 1),
        ranks_per_host=per_host,
        local=sent * (per_host - 1),
        network=sent * (shards - per_host) + between * shards,
    )


def _group(homes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the replicas of each host that has some."""
    return HostMap.of(homes).hosts


def _count_lists(leaves: int, hosts: tuple[tuple[int, ...], ...]) -> tuple[int, int]:
    """Return the lists of gradients of the rank that holds most, and those in its buckets."""
    spans = assign_microbatches(leaves, hosts)
    nodes = assign_nodes(leaves, hosts)
    lists = [
        (count_sums(span, leaves), len(own) if len(spans) > 1 else 0)
        for span, own in zip(spans, nodes, strict=True)
    ]
    return max(lists, key=sum)


def _count_traffic(
    leaves: int, hosts: tuple[tuple[int, ...], ...], size: int, *, scatter: bool = False
) -> tuple[int, int]:
    """Return the most bytes that a host exchanges in memory, and sends to others, for a sum.

    Args:
        leaves: The number of micro-batches of a batch.
        hosts: The ranks of each host.
        size: The bytes of the gradients.
        scatter: Whether each rank gets its slice of the sum only.
    """
    nodes = assign_nodes(leaves, hosts)
    others = len(hosts) - 1
    local = 0
    network = 0
    for ranks_here, sums in zip(hosts, find_host_nodes(hosts, nodes, leaves), strict=True):
        here = len(ranks_here)
        # A rank reads its slice of the nodes of the others, and writes the sum for each of them.
        lists = sum(len(nodes[rank]) for rank in ranks_here) + (0 if scatter else here)
        local = max(local, size * lists * (here - 1) // here)
        # Its share of the sums goes to each other host, and its part of the result.
        network = max(network, -(-size * (len(sums) + 1) * others // len(hosts)))
    return local, network


def _sum_stages(training: TrainingMemory, balance: Sequence[int]) -> list[int]:
    """Return the bytes of the parameters of each stage; stage 0 has those outside of blocks."""
    blocks = iter(training.blocks)
    sizes = [sum(islice(blocks, count)) for count in balance]
    sizes[0] += training.parameters - sum(training.blocks)
    return sizes


def _count_stage_traffic(
    training: TrainingMemory, balance: Sequence[int], sizes: Sequence[int], homes: Sequence[int]
) -> tuple[int, int]:
    """Return the traffic of stages: gradients of each stage, and outputs between stages."""
    stages = len(balance)
    hosts = homes[-1] + 1
    replicas = len(homes) // stages
    local = network = 0
    for stage, end in enumerate(accumulate(balance)):
        size = training.gradients * sizes[stage] // max(training.parameters, 1)
        traffic = _count_traffic(training.leaves, _group(homes[stage::stages]), size)
        local = local + traffic[0]
        network = network + traffic[1]
        if stage + 1 < stages:  # outputs of all micro-batches, and their gradients
            sent = 2 * training.outputs[end - 1] * training.leaves // replicas
            pairs = zip(homes[stage::stages], homes[stage + 1 :: stages], strict=True)
            crossing = sum(home != other for home, other in pairs)
            network += -(-sent * crossing // hosts)
            local += -(-sent * (replicas - crossing) // hosts)
    return local, network
