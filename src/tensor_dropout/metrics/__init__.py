"""Metrics, from arrays with a row per example: numpy only, so that records are read without torch."""
