"""Several optimizers of one model, each of its own parameters, behind the interface of one.

    optimizers    SparseAdam: embedding        AdamW: body, head
    as one        param_groups 0               param_groups 1, 2
                  parameters 0                 parameters 1 to 8

The state dict has the format of one optimizer, so it is saved, gathered, hashed and compared as
that of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from lockstep.kernel.errors import UsageError

__all__ = ["CombinedOptimizer"]


class CombinedOptimizer(Optimizer):
    """Steps several optimizers, in their order.

    Args:
        members: The optimizers, which have no parameter in common.
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        # Optimizer.__init__ would make parameter groups; those here are the members'.
        self.members = tuple(members)
        self.defaults = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of all members, in the order of the members."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """The states of all members, by parameter."""
        return {key: state for member in self.members for key, state in member.state.items()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every member."""
        for member in self.members:
            member.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of one optimizer with all parameter groups."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        count = 0  # of the parameters of earlier members
        for member in self.members:
            packed = member.state_dict()
            state |= {count + number: values for number, values in packed["state"].items()}
            groups += [
                {**group, "params": [count + number for number in group["params"]]}
                for group in packed["param_groups"]
            ]
            count += sum(len(group["params"]) for group in packed["param_groups"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict that `state_dict` returned."""
        saved = list(state_dict["param_groups"])
        if len(saved) != len(self.param_groups):
            raise UsageError(
                f"the state has {len(saved)} parameter groups, the optimizers of this trainer have "
                f"{len(self.param_groups)}: load a state of the same optimizers"
            )
        for member in self.members:
            count = len(member.param_groups)
            groups = saved[:count]
            saved = saved[count:]
            numbers = {number for group in groups for number in group["params"]}
            state = {n: values for n, values in state_dict["state"].items() if n in numbers}
            member.load_state_dict({"state": state, "param_groups": groups})
