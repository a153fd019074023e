"""Short programs, one a call of `torch.distributed`: `python -m lockstep.examples.NAME`."""
