"""`lockstep check` and `lockstep chaos`: a script in several layouts, or with killed ranks."""
