"""Evaluations of trained runs: which attacks and noise, what is kept of each example, and what is said of it."""
