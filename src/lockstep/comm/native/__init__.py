"""The native part of the backend "lockstep": its compilation, its cache and its import."""
