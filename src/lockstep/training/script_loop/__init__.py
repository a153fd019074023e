"""A script's own loop over micro-batches: `ls.exact`, and the trainer's manual steps."""
