"""Heads on frozen maps, compared: see ``benchmarks/position_heads.py``."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "estimators"))  # maps, ridge and records of that benchmark
