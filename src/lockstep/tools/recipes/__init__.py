"""Complete trainings on real data, one file per recipe."""
