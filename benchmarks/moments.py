"""Time and memory of the exact moments, against Monte-Carlo, in one interleaved run.

    python benchmarks/moments.py

Time: one ``moments`` call against 100 train-mode ``layer(x)`` calls at the CIFAR-100 head, both without gradients,
and the error of either's standard deviation against the float64 moments (which the tests compare with enumeration).
Memory: the peak of ``moments`` over that of the plain forward at the ImageNet head, x and parameters counted in both,
each in a process of its own.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import tensor_dropout as td

HEADS = {
    "CP 200": lambda: td.CPRegression((512, 4, 4), 100, 200, dropout=0.8),
    "Tucker (256,3,3,96)": lambda: td.TuckerRegression((512, 4, 4), 100, (256, 3, 3, 96), dropout=0.8),
    "TT (64,32,32)": lambda: td.TTRegression((512, 4, 4), 100, (64, 32, 32), dropout=0.8),
}
REPEATS = 15


def draw(layer, x):
    return [layer(x) for _ in range(100)]


def seconds(function, *arguments):
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    function(*arguments)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


@torch.no_grad()
def time_heads(device):
    print("| head | 100 × layer(x), ms | moments, ms | speed-up | std error of 100 draws | of moments |")
    print("|---|---|---|---|---|---|")
    for name, make in HEADS.items():
        torch.manual_seed(0)
        layer = make().to(device)
        x = torch.randn(128, 512, 4, 4, device=device)
        layer(x), layer.moments(x)
        forward, moments = [], []
        for _ in range(REPEATS):  # interleaved, so that both meet the same machine
            forward.append(seconds(draw, layer, x))
            moments.append(seconds(layer.moments, x))
        slow, fast = statistics.median(forward), statistics.median(moments)
        truth = layer.double().moments(x.double()).variance.sqrt()
        layer.float()
        drawn = torch.stack(draw(layer, x)).std(0)
        errors = [
            ((std.double() - truth) / truth).abs().mean().item() for std in (drawn, layer.moments(x).variance.sqrt())
        ]
        print(
            f"| {name} | {slow * 1e3:.1f} | {fast * 1e3:.2f} | {slow / fast:.0f}× | {errors[0]:.1%} | {errors[1]:.1e} |"
        )


def peak_memory():
    """Peak resident memory of this process in MiB; getrusage would begin with that of the parent."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) / 1024


def measure_memory(what):
    """Peak resident memory of one call at the ImageNet head, in MiB beyond the interpreter and torch."""
    torch.set_num_threads(1)
    torch.randn(64, 64) @ torch.randn(64, 64)
    small = td.TuckerRegression((8, 3, 3), 5, (4, 2, 2, 3), dropout=0.8)
    small.moments(torch.randn(2, 8, 3, 3)).variance.sum().backward()  # imports and first-call buffers
    before = peak_memory()
    layer = td.TuckerRegression((2048, 7, 7), 1000, (256, 3, 3, 256), init="normal", dropout=0.8)
    x = torch.randn(64, 2048, 7, 7)
    if what == "nothing":
        return peak_memory() - before
    with torch.set_grad_enabled("gradient" in what):
        out = layer(x) if what.startswith("forward") else layer.moments(x).variance
        if "gradient" in what:
            out.sum().backward()
    return peak_memory() - before


def compare_memory():
    peaks = {}
    for what in ("nothing", "forward", "moments", "forward gradient", "moments gradient"):
        command = [sys.executable, __file__, "--memory", what]
        peaks[what] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    print("\n2048×7×7→1000, Tucker (256,3,3,256), batch 64: peak memory with x and parameters, MiB")
    for what, peak in peaks.items():
        print(f"- {what}: {peak:.0f}")
    print(f"- moments / forward: {peaks['moments'] / peaks['forward']:.2f}")
    print(f"- with gradient: {peaks['moments gradient'] / peaks['forward gradient']:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", metavar="WHAT", help="print the peak memory of one pass alone (used by itself)")
    arguments = parser.parse_args()
    if arguments.memory:
        print(json.dumps(measure_memory(arguments.memory)))
    else:
        time_heads("cuda" if torch.cuda.is_available() else "cpu")
        if not torch.cuda.is_available():
            compare_memory()
