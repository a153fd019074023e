"""What a run writes while it works, and its values read back."""
