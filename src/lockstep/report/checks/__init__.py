"""The doctor's checks: each tries something out, and says what it found."""
