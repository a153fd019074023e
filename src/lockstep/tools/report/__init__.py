"""Reports, comparisons and the doctor: everything that is displayed after a run."""
