"""Plans of the memory and the traffic that a training needs in each storage."""
