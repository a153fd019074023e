"""Elastic runs: a round ends when a rank is killed, and the next one continues its work."""
