"""How long it takes to import torch, and then every public name of the library, in fresh interpreters.

    python benchmarks/import_time.py
    python benchmarks/import_time.py --source ../other-checkout/src

The interpreters take turns: a shared machine slows all rows alike. ``--source`` measures another checkout beside the
installed library.
"""

import argparse
import os
import statistics
import subprocess
import sys

TORCH = """
import time
began = time.perf_counter()
import torch
print(time.perf_counter() - began)
"""
LIBRARY = """
import time
import torch
began = time.perf_counter()
import tensor_dropout as td
for name in td.__all__:
    getattr(td, name)
print(time.perf_counter() - began)
import sys
print(*(name for name in ("triton", "sympy", "torch._dynamo") if name in sys.modules))
"""


def measure(code, source=None):
    """Seconds in a fresh interpreter, and what else it printed."""
    environment = {**os.environ, "PYTHONPATH": source} if source else None
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    seconds, _, rest = done.stdout.strip().partition("\n")
    return float(seconds), rest


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="interpreters per row")
    parser.add_argument("--source", help="the src folder of another checkout, for a row of its own")
    arguments = parser.parse_args()
    rows = {"import torch": (TORCH, None), "then every name of tensor_dropout": (LIBRARY, None)}
    if arguments.source:
        rows[f"the same from {arguments.source}"] = (LIBRARY, arguments.source)
    seconds = {name: [] for name in rows}
    loaded = dict.fromkeys(rows, "")
    for _ in range(arguments.repeats):
        for name, (code, source) in rows.items():
            elapsed, loaded[name] = measure(code, source)
            seconds[name].append(elapsed)
    print("| | median, s | smallest, s | also loads |")
    print("|---|---|---|---|")
    for name, values in seconds.items():
        print(f"| {name} | {statistics.median(values):.3f} | {min(values):.3f} | {loaded[name] or 'nothing heavy'} |")


if __name__ == "__main__":
    main()
