"""Variables that a resumed script has not set, because it does not repeat finished epochs.

    for batch in trainer.batches(data, 128):      yields nothing: the epoch was finished before
        loss = trainer.step(batch)
    print(loss)                                   NameError, with a note that explains it

The note is added where an uncaught error is shown.
"""

from __future__ import annotations

import dis

from lockstep.launcher.tracebacks import explanations

__all__ = ["explain_unset_variables"]

_first: list[int] = []  # the first epoch that yielded nothing


def explain_unset_variables(epoch: int) -> None:
    """Add a note to an uncaught NameError, since an epoch of a resumed script yields nothing."""
    if not _first:
        _first.append(epoch)
        explanations.append(_explain)


def _explain(error: BaseException) -> str:
    """Return the note; "" for other errors, and for names that the failing function never sets."""
    trace = error.__traceback__
    if not isinstance(error, NameError) or trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    steps = list(dis.get_instructions(trace.tb_frame.f_code))
    # The instruction that failed has the name; an UnboundLocalError has it only in its message.
    name = next((step.argval for step in steps if step.offset == trace.tb_lasti), None)
    stored = {step.argval for step in steps if step.opname.startswith("STORE_")}
    if not isinstance(name, str) or name not in stored:
        return ""
    return (
        f"the run was resumed, and epoch {_first[0]} was finished before: its loop over "
        f"batches(...) yields nothing, so its body has not set {name!r}. After the "
        "loop, write trainer.last_result.loss, which has the loss of that epoch's last step"
    )
