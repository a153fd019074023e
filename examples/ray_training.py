"""Ray starts the ranks: one actor per rank, on whichever hosts of the cluster have free cores.

    $ pip install "ray[default]"
    $ python examples/ray_training.py -n 4                           # a new cluster on this host
    $ RAY_ADDRESS=10.0.0.1:6379 python examples/ray_training.py -n 4 # an existing cluster

Each actor gets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Which of them share a host is found
out by `ls.init()`: ranks of one host communicate through shared memory. The digest is that of one
process, for any number of actors on any number of hosts.
"""

from __future__ import annotations

import argparse
import os
import socket
from functools import partial

import ray  # type: ignore[import-not-found, unused-ignore]
import torch

import lockstep as ls
from lockstep.data.datasets import digits


class Rank:
    """One rank, in a process of its own."""

    def find_endpoint(self) -> tuple[str, int]:
        """Return the address of this host, and a free port."""
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def train(self, variables: dict[str, str]) -> tuple[str, str]:
        """Train with the other ranks; return the digest of the weights and the backend."""
        os.environ.update(variables)
        world = ls.init(timeout=60)
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
        sgd = partial(torch.optim.SGD, lr=0.1)
        trainer = ls.Trainer(model, torch.nn.CrossEntropyLoss(), sgd, microbatches=8, loggers=())
        for batch in trainer.batches(digits(), batch_size=128):
            trainer.step(batch)
        digest = trainer.digest()
        ls.shutdown()
        return digest, world.backend


def run(nprocs: int) -> set[tuple[str, str]]:
    """Train on `nprocs` actors; return the digests and backends that the ranks report."""
    ranks = [ray.remote(num_cpus=1)(Rank).remote() for _ in range(nprocs)]
    address, port = ray.get(ranks[0].find_endpoint.remote())
    variables = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(nprocs)}
    results = [rank.train.remote({**variables, "RANK": str(i)}) for i, rank in enumerate(ranks)]
    return set(ray.get(results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", "--nprocs", type=int, default=2, help="Number of ranks.")
    nprocs = parser.parse_args().nprocs
    is_new = "RAY_ADDRESS" not in os.environ
    ray.init(log_to_driver=False, **({"num_cpus": nprocs} if is_new else {}))
    [(digest, backend)] = run(nprocs)
    print(f"{nprocs} ranks on {backend}: {digest}")
