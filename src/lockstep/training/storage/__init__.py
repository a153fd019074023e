"""Shared and sharded storage: parameters and optimizer state that no rank has to hold alone."""
