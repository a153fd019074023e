"""Averaged gradients for a loop that exists already."""
