"""The parts of benchmarks/labelling.py."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "estimators"))
