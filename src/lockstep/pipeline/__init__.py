"""A model in stages: the cut, what crosses a boundary, the ranks that run it."""
