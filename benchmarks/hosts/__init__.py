"""Reductions and training across hosts, compared with Gloo."""
