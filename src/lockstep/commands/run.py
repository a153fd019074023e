"""`lockstep run`: a whole script on every rank."""

from __future__ import annotations

import click

from lockstep.run.script import run_script

__all__ = ["command"]


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-n", "--nproc-per-node", "--nproc_per_node", "nprocs", default=1, show_default=True)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as for python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(nprocs: int, module: bool, script: str, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT with ARGUMENTS on every rank, as `python SCRIPT` would."""
    run_script(script, list(arguments), nprocs, module=module)
