"""Pipelines: schedules and their simulation, the partition into stages, and what runs them."""
