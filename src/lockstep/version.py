"""The version of Lockstep, in a module that imports nothing."""

__all__ = ["VERSION"]

VERSION = "0.1.0"
