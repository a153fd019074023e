"""Plans of pipelines: schedules, their simulation, where a model is cut. Pure."""
