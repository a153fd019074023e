"""Other distributions whose module is called lockstep, too.

Distributions install files of one module into one folder. The one that is installed last replaces
`__init__.py`, and uninstalling it removes that file.
"""

import sys

__all__ = ["find_conflict"]


def find_conflict() -> str:
    """Return which distribution has replaced this package, with the remedy; "" if none has."""
    if hasattr(sys.modules["lockstep"], "PUBLIC"):
        return ""
    from importlib.metadata import packages_distributions  # which takes 20 ms to import

    others = {*packages_distributions().get("lockstep", ())} - {"torch-lockstep"}
    names = " ".join(sorted(others)) or "lockstep"
    return (
        "the module lockstep is not that of torch-lockstep: another distribution replaced its "
        f"files; run `pip uninstall {names}`, and install torch-lockstep again"
    )
