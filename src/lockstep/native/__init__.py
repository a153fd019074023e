"""The native part of the backend "lockstep": compiled for one torch, found, loaded."""
