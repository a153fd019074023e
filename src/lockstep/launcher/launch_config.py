"""The configuration of a launch: the options of `lockstep run`, checked.

`launch_script` executes a configuration on one host, `elastic_launch` as an elastic run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lockstep.kernel.errors import UsageError
from lockstep.launcher.hang_monitor import HangPolicy
from lockstep.launcher.listening_socket import LOOPBACK
from lockstep.launcher.run_folder import RUNS
from lockstep.launcher.supervisor import STOP_GRACE

__all__ = ["HOST_TIMEOUT", "LaunchConfig"]

HOST_TIMEOUT = 10.0  # seconds


# It has many attributes: one for each option.
@dataclass(frozen=True)
class LaunchConfig:
    """The options of `lockstep run`, with the names and meanings of torchrun.

    Attributes:
        target: The script, module or program.
        arguments: Its arguments.
        kind: "script", "module" or "program".
        nprocs: Ranks on each host.
        nnodes: Number of hosts.
        node_rank: Index of this host, from 0.
        master_addr: Address of host 0.
        master_port: Port on host 0; 0 selects a free one.
        run_id: Name of the launch; empty for a random one.
        secret_file: File with the secret of an elastic run on several hosts; None for a run without
            a secret, or with one in the environment (`comm/transport/secret.py`).
        log_dir: Folder that gets this run's folder; None for "runs".
        name: Name of this run's folder; None for the target's name with date and time.
        shown: Local ranks whose output is shown; None for all.
        shows_stdout: Whether their standard output is shown, and not only their standard error.
        grace: Seconds that the ranks have to stop after SIGTERM.
        resumed_run: Folder of the run to continue; None for a new run.
        resumes_newest: Whether to continue the newest run of this command that did not succeed.
        hang_policy: When ranks count as hanging, and what happens then.
        min_nprocs: The minimum number of ranks of an elastic run, on all hosts together; None for
            a run that ends when a rank is killed.
        max_nprocs: The number of ranks, on all hosts together, with which an elastic run starts;
            None for `nprocs` on each host.
        host_timeout: Seconds of silence after which a host of an elastic run counts as lost.

    Raises:
        UsageError: The values contradict each other; the message names the option.
    """

    target: str
    arguments: tuple[str, ...] = ()
    kind: str = "script"
    nprocs: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = LOOPBACK
    master_port: int = 0
    run_id: str = ""
    secret_file: str | None = None
    log_dir: str | None = None
    name: str | None = None
    shown: frozenset[int] | None = None
    shows_stdout: bool = True
    grace: float = STOP_GRACE
    resumed_run: Path | None = None
    resumes_newest: bool = False
    hang_policy: HangPolicy = field(default_factory=HangPolicy)
    min_nprocs: int | None = None
    max_nprocs: int | None = None
    host_timeout: float = HOST_TIMEOUT

    def __post_init__(self) -> None:
        """Check the values."""
        if self.nprocs < 1:
            raise UsageError(f"--nproc-per-node {self.nprocs}: a host needs at least one rank")
        if self.nnodes < 1:
            raise UsageError(f"--nnodes {self.nnodes}: at least one host is needed")
        if self.node_rank >= self.nnodes:
            raise UsageError(
                f"--node-rank {self.node_rank}: with --nnodes {self.nnodes} it must be from 0 to "
                f"{self.nnodes - 1}"
            )
        if self.resumes_newest and self.nnodes > 1:
            raise UsageError(
                f"--resume auto: with --nnodes {self.nnodes} hosts could choose different runs; "
                f"name the run on every host, such as --resume {RUNS}/NAME"
            )
        if self.name is not None and (self.name == ".." or Path(self.name).name != self.name):
            raise UsageError(
                f"--name {self.name}: expected a name without a slash; --log-dir DIR is the folder "
                f"that it is put into"
            )
        if self.name is not None and (self.resumed_run is not None or self.resumes_newest):
            raise UsageError("--name names a new run; a run that is resumed keeps its folder")
        if max(self.shown or (), default=0) >= self.nprocs:
            raise UsageError(
                f"--local-ranks-filter names local rank {max(self.shown or ())}, but with "
                f"--nproc-per-node {self.nprocs} local ranks are from 0 to {self.nprocs - 1}"
            )
        if self.secret_file is not None and self.nnodes > 1 and not self.is_elastic:
            raise UsageError(
                f"--secret-file {self.secret_file}: only the launchers of an elastic run (--min, "
                f"--max) have a secret; omit it and unset LOCKSTEP_SECRET_FILE, and use a private "
                f"network"
            )
        if self.min_nprocs is not None:
            self._check_elastic(self.min_nprocs)

    def _check_elastic(self, least: int) -> None:
        most = self.elastic_nprocs
        if not 1 <= least <= most:
            raise UsageError(f"--min {least}: expected a number of ranks from 1 to --max ({most})")
        if most < self.nnodes:
            raise UsageError(
                f"--max {most}: with --nnodes {self.nnodes} each host needs at least one rank"
            )
        if self.kind == "program":
            raise UsageError(
                "--min and --max: a program that runs without Python (--no-python) cannot continue "
                "without a killed rank"
            )

    @property
    def elastic_nprocs(self) -> int:
        """The number of ranks, on all hosts together, with which an elastic run starts."""
        return self.nprocs * self.nnodes if self.max_nprocs is None else self.max_nprocs

    @property
    def is_elastic(self) -> bool:
        """Whether the run continues when a rank is killed."""
        return self.min_nprocs is not None
