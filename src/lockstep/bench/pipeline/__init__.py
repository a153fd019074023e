"""What `lockstep bench pipeline` measures: a model in two stages, beside the peers."""
