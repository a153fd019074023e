"""What `lockstep bench step` measures: a whole training step, beside the peers."""
