"""Training: the loop, its optimiser, its schedule."""
