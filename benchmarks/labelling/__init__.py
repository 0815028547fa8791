"""The parts of benchmarks/labelling.py."""
