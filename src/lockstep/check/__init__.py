"""`lockstep check`: a script in several layouts, and where the first bit differs."""
