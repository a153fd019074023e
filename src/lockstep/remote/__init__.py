"""The driver: a process outside the world that starts workers and commands them."""
