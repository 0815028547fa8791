"""Minimizing the exact expected loss of a tensor regression to the end: no masks, no learning rate, no epochs."""
