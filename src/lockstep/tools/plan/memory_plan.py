"""The memory of a rank in each storage, and the bytes that ranks exchange per step.

    replicated        parameters, optimizer state and gradients are whole on every rank
    shared            one copy of parameters and optimizer state on the host
    stages            every rank has the parameters, gradients and optimizer state of its blocks

Gradients are lists of the gradients of all parameters. A rank holds one list for the micro-batch
that it computes, one for each node of the tree that waits for its sibling, and, with several
ranks, one for each node in the buckets that ranks add. The functions are pure and do not depend on
processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.comm.hosts.map import HostMap
from lockstep.comm.hosts.reduction_plan import plan_reduction
from lockstep.data.assignment import assign_microbatches, assign_nodes
from lockstep.kernel.tree import TreeAccumulator

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
        microbatches: The number of micro-batches of a batch.
        blocks: The bytes of the parameters of each block; empty if the model has no blocks.
        outputs: The bytes of a micro-batch's output of each block.
        is_computed: Whether the values were computed without memory, so that `unused` is not
            known.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    unused: int
    process: int
    shared: int
    microbatches: int
    blocks: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    is_computed: bool = False


@dataclass(frozen=True)
class StoragePlan:
    """The plan of one storage: bytes of the rank that holds most, and bytes exchanged per step.

    Attributes:
        storage: "replicated" or "shared".
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
    plans = [_plan_replicated(training, hosts, ranks), _plan_shared(training, hosts, ranks)]
    counts = [n for n in range(2, min(len(training.blocks), ranks) + 1) if ranks % n == 0]
    plans += [_plan_stages(training, hosts, ranks, stages) for stages in counts]
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


def _plan_replicated(training: TrainingMemory, hosts: int, ranks: int) -> StoragePlan:
    if refusal := _refuse(training, ranks):
        return StoragePlan("replicated", refusal=refusal)
    placed = _place(hosts, ranks)
    lists = _count_lists(training.microbatches, placed)
    local, network = _count_traffic(training.microbatches, placed, training.gradients)
    return StoragePlan(
        storage="replicated",
        parameters=training.parameters,
        gradients=training.gradients * sum(lists),
        optimizer=training.optimizer,
        activations=_scale_activations(training, lists[0]),
        process=training.process + training.shared // (ranks // hosts + 1),
        ranks_per_host=ranks // hosts,
        local=local,
        network=network,
    )


def _plan_shared(training: TrainingMemory, hosts: int, ranks: int) -> StoragePlan:
    refusal = "all ranks must be on one host" if hosts > 1 else _refuse(training, ranks)
    if refusal:
        return StoragePlan("shared", refusal=refusal)
    placed = _place(1, ranks)
    lists = _count_lists(training.microbatches, placed)
    local, _ = _count_traffic(training.microbatches, placed, training.gradients, scatter=True)
    return StoragePlan(
        storage="shared",
        parameters=-(-training.parameters // ranks),
        gradients=training.gradients * sum(lists),
        optimizer=-(-training.optimizer // ranks),
        activations=_scale_activations(training, lists[0]),
        process=training.process + training.shared // (ranks + 1),
        ranks_per_host=ranks,
        local=local,
    )


def _plan_stages(training: TrainingMemory, hosts: int, ranks: int, stages: int) -> StoragePlan:
    """Return the plan of stages of consecutive blocks whose largest has the fewest bytes."""
    balance = _balance(training.blocks, stages)
    replicas, per_host = ranks // stages, ranks // hosts
    if refusal := _refuse(training, replicas):
        return StoragePlan("replicated", balance, refusal)
    ends = [sum(balance[: stage + 1]) for stage in range(stages)]
    sizes = [sum(training.blocks[end - n : end]) for n, end in zip(balance, ends, strict=True)]
    # Tensors outside of the blocks belong to stage 0.
    sizes[0] += training.parameters - sum(training.blocks)
    share = max(sizes) / max(training.parameters, 1)
    # Each replica is on the hosts of its ranks, which are consecutive.
    of_stage = [range(stage, ranks, stages) for stage in range(stages)]
    local = network = 0
    for stage, numbers in enumerate(of_stage):
        homes = [[n for n, r in enumerate(numbers) if r // per_host == h] for h in range(hosts)]
        placed = tuple(tuple(home) for home in homes if home)
        size = training.gradients * sizes[stage] // max(training.parameters, 1)
        traffic = _count_traffic(training.microbatches, placed, size)
        local, network = local + traffic[0], network + traffic[1]
        if stage + 1 < stages:  # the activations of each micro-batch, and their gradients
            sent = 2 * training.outputs[ends[stage] - 1] * training.microbatches // replicas
            crossing = sum(r // per_host != (r + 1) // per_host for r in numbers)
            network += -(-sent * crossing // hosts)
            local += -(-sent * (replicas - crossing) // hosts)
    lists = _count_lists(training.microbatches, _place(1, replicas))
    return StoragePlan(
        storage="replicated",
        balance=balance,
        parameters=max(sizes),
        gradients=round(training.gradients * share) * sum(lists),
        optimizer=round(training.optimizer * share),
        activations=_scale_activations(training, lists[0]),
        process=training.process + training.shared // (per_host + 1),
        ranks_per_host=per_host,
        local=local,
        network=network,
    )


def _refuse(training: TrainingMemory, replicas: int) -> str:
    if replicas > training.microbatches:
        return f"{replicas} replicas cannot share {training.microbatches} micro-batches"
    return ""


def _place(hosts: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host."""
    per_host = ranks // hosts
    return tuple(tuple(range(host * per_host, (host + 1) * per_host)) for host in range(hosts))


def _count_lists(leaves: int, hosts: tuple[tuple[int, ...], ...]) -> tuple[int, int]:
    """Return the lists of gradients of the rank that holds most, and those in its buckets."""
    spans, nodes = assign_microbatches(leaves, hosts), assign_nodes(leaves, hosts)
    lists = [
        (count_sums(span, leaves), len(own) if len(spans) > 1 else 0)
        for span, own in zip(spans, nodes, strict=True)
    ]
    return max(lists, key=sum)


def _scale_activations(training: TrainingMemory, lists: int) -> int:
    """Return activations and unused memory of a rank that holds lists of gradients.

    What the allocator cannot use lies between the tensors that outlive a micro-batch: parameters,
    and the lists of gradients.
    """
    measured = count_sums(range(training.microbatches), training.microbatches)
    return training.activations + training.unused * (1 + lists) // (1 + measured)


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
    plan = plan_reduction(HostMap(hosts), nodes, leaves, scatter=scatter)
    ranks = len(nodes)
    local = network = 0
    for ranks_here, terms in zip(hosts, plan.terms, strict=True):
        here = len(ranks_here)
        # A rank reads its slice of the nodes of the others, and writes the sum for each of them.
        lists = sum(len(nodes[rank]) for rank in ranks_here) + (0 if scatter else here)
        local = max(local, size * lists * (here - 1) // here)
        others = ranks if plan.is_exchange else ranks - here
        sent = len(terms) * others + (here * (len(hosts) - 1) if plan.returns else 0)
        network = max(network, -(-size * sent // ranks))
    return local, network


def _balance(blocks: Sequence[int], stages: int) -> tuple[int, ...]:
    """Divide blocks into stages of consecutive blocks, so that the largest has the fewest bytes."""
    limit = next(limit for limit in _sums(blocks) if len(_fill(blocks, limit)) <= stages)
    counts = _fill(blocks, limit)
    while len(counts) < stages:  # split a stage of several blocks
        index = next(n for n, count in enumerate(counts) if count > 1)
        counts[index : index + 1] = [counts[index] - 1, 1]
    return tuple(counts)


def _sums(blocks: Sequence[int]) -> Iterator[int]:
    """Yield the sums of consecutive blocks that are not smaller than any block, ascending."""
    total = len(blocks)
    sums = {sum(blocks[a:b]) for a in range(total) for b in range(a + 1, total + 1)}
    yield from sorted(value for value in sums if value >= max(blocks))


def _fill(blocks: Sequence[int], limit: int) -> list[int]:
    """Return the number of blocks of each stage if stages are filled up to a limit."""
    counts, held = [0], 0
    for size in blocks:
        if counts[-1] and held + size > limit:
            counts.append(0)
            held = 0
        counts[-1] += 1
        held += size
    return counts
