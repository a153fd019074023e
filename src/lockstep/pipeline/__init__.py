"""Pipeline parallelism: partitions a model into stages, plans a schedule and executes it."""
