"""Differences in words: what was found, and where to look for its cause. Pure."""

from __future__ import annotations

from lockstep.check.difference import Difference

__all__ = ["advice", "sentence"]

FOUND = {
    "initial": "`{parameter}` differs before the first step",
    "between": "`{parameter}` was changed between two steps",
    "data": "the data differ",
    "input": "module `{module}` gets other inputs, though all modules before it agree",
    "output": "module `{module}` computes something else from the same inputs",
    "forward": "module `{module}` computes something else from the same inputs",
    "loss": "the loss differs, though the model computes the same",
    "written": "parameter `{parameter}` was changed before the update",
    "gradient": "the gradient of `{parameter}` differs, though the forward pass is the same",
    "update": "parameter `{parameter}` differs after the update",
    "buffer": "buffer `{parameter}` differs after the step",
    "state": "the optimizer's state of `{parameter}` differs",
    "digest": "the digest differs, though all parameters and buffers agree",
    "steps": "the script does not take the same steps",
}

ADVICE = {
    "initial": "Call torch.manual_seed(...) before the model is built, and do not let the model "
    "or a loaded checkpoint depend on the layout.",
    "between": "Look for code that writes into the model after a step, and make it depend on "
    "the model and its optimizer alone.",
    "data": "The batch of a step must be the same in every layout. Look for random numbers "
    "without a seed or from a generator of their own (in the dataset, its transforms, the "
    "collate_fn or the sampler), for a DistributedSampler, and for code that depends on the rank.",
    "input": "Look for a tensor that is written in place after it was passed on.",
    "output": "The module depends on something besides its inputs, parameters and buffers. Look "
    "for state that it keeps in Python (a counter, a generator of its own, a value that another "
    "module left in an attribute); keep such state in a buffer, and draw random numbers from "
    "torch's default generator.",
    "loss": "Look for state that the loss function keeps in Python, and for random numbers from "
    "a generator of its own.",
    "written": "Look for code that writes into parameters during forward or backward, such as "
    "torch.nn.Embedding(max_norm=...); keep what forward writes in a buffer.",
    "gradient": "Look for backward hooks, for autograd functions of your own and for random "
    "numbers that are drawn in backward.",
    "update": "Look for options of the optimizer or its schedule that differ between ranks or "
    "depend on their number.",
    "buffer": "Look for code that writes into the buffer outside of the model's forward pass.",
    "state": "Look for options of the optimizer that differ between ranks.",
    "digest": "Look for values that the model's state_dict() adds.",
    "steps": "Look for a number of steps, or of trainers, that depends on the rank or on the "
    "number of ranks.",
}
ADVICE["forward"] = ADVICE["output"]


def sentence(found: Difference, trainers: int = 1) -> str:
    """Return where a difference is and what it is, without a full stop.

    Args:
        found: The difference.
        trainers: The number of trainers that the script makes.
    """
    place = [f"trainer {found.trainer}"] if trainers > 1 else []
    if found.what != "initial":
        place.append(f"step {found.step}")
    if found.microbatch is not None:
        place.append(f"micro-batch {found.microbatch}")
    if found.rank:  # rank 0 agrees with the reference
        place.append(f"rank {found.rank}")
    said = FOUND[found.what].format(module=found.module, parameter=found.parameter)
    return f"{', '.join(place)}: {said}" if place else said


def advice(found: Difference) -> str:
    """Return what to look for, as whole sentences."""
    return ADVICE[found.what]
