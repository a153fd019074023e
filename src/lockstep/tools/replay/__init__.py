"""`lockstep replay` and `lockstep bisect`: recorded steps, computed again."""
