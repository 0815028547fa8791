"""Fine-tuning of networks with fitted heads: see ``benchmarks/finetuning.py``."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "estimators"))  # the data sets, splits and ridge of that benchmark
