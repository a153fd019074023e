"""The backend "lockstep" of groups whose ranks are on several hosts."""
