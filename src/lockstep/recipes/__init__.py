"""Ready training jobs on real data, one a file."""
