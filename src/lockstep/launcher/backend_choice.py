"""Which backend `ls.init()` uses if the user names none, and why.

    tensors on    ranks on         backend "lockstep"    used
    accelerator   any              -                     torch's backend for it (nccl for CUDA),
                                                         and gloo for tensors on the CPU
    a shared one  any              -                     gloo, since nccl refuses it
    CPU           one host         can be used           lockstep
    CPU           one host         cannot                gloo
    CPU           several hosts    on every host         lockstep
    CPU           several hosts    not on every host     gloo

The rule is a function of plain values, for `ls.init()` and for `lockstep doctor`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BackendChoice", "choose_backend"]


@dataclass(frozen=True)
class BackendChoice:
    """A backend and the reason for it.

    Attributes:
        name: The backend, for `torch.distributed.init_process_group`.
        reason: Why it is used, as the end of a sentence that names it: "because ...".
        is_slower: Whether "lockstep" would be used if it could be.
    """

    name: str
    reason: str
    is_slower: bool = False


def choose_backend(
    *,
    kind: str = "cpu",
    device_backend: str = "gloo",
    is_shared: bool = False,
    is_single_host: bool,
    unavailable: str | None,
    requested: str | None = None,
) -> BackendChoice:
    """Return the backend for ranks that do not name one.

    Args:
        kind: The type of the devices on which the ranks compute, such as "cpu" or "cuda".
        device_backend: The backend for tensors on an accelerator.
        is_shared: Whether several ranks compute on one accelerator.
        is_single_host: Whether all ranks are on one host.
        unavailable: Where and why the backend "lockstep" cannot be used, such as "here: it is not
            built"; None if every host of the run can use it.
        requested: The value of LOCKSTEP_BACKEND.
    """
    if kind != "cpu":
        if is_shared:
            reason = f"because several ranks compute on one device, which {device_backend} refuses"
            return BackendChoice(f"cpu:gloo,{kind}:gloo", reason)
        # With a custom backend's name after "cpu:", torch has no default backend on the CPU.
        name = f"cpu:gloo,{kind}:{device_backend}"
        if device_backend == "gloo":
            reason = "which is slower: it copies tensors to the CPU; this torch has no other "
            return BackendChoice(name, f"{reason}backend for {kind}", is_slower=True)
        reason = f"because {device_backend} is made for {kind}, and torch does not combine it "
        return BackendChoice(name, f"{reason}with a backend of another package")
    if requested:
        return BackendChoice(requested, "because LOCKSTEP_BACKEND selects it")
    if unavailable is not None:
        slower = "many times slower" if is_single_host else "slower"
        reason = f"which is {slower} than the backend 'lockstep'; that is not available "
        return BackendChoice("gloo", reason + unavailable, is_slower=True)
    reason = "because the ranks of a host share memory"
    if not is_single_host:
        reason += ", and no byte is sent to a host twice"
    return BackendChoice("lockstep", reason)
