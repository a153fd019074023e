"""Reports, comparisons, timelines and the doctor: everything that is displayed after a run."""
