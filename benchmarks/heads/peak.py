"""Peak memory of one forward + backward pass, with x and the parameters; on the CPU each in a process of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heads.cases import CASES, Case
from heads.contenders import Contender, list_contenders
from heads.inputs import make_inputs, make_module
from heads.timing import Pass, make_pass

COMMAND = Path(__file__).parents[1] / "heads.py"


def peak_on_cuda(run: Pass, module: nn.Module, x: Tensor) -> int:
    """Bytes that a pass allocates at most, and those of x and the parameters."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(x)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before + x.nbytes + sum(p.nbytes for p in module.parameters())


def peaks_on_cpu(keys: list[str], request: dict[str, Any]) -> dict[str, int | None]:
    """Peak bytes per contender; None where it failed."""
    command = [sys.executable, str(COMMAND), "--peak", json.dumps({**request, "contenders": keys})]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 60 * len(keys), check=True)
        return json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError):
        return dict.fromkeys(keys)


def answer(request: dict[str, Any]) -> dict[str, int | None]:
    """In a fresh process: forks for each contender, so that none finds the memory of another and torch loads once."""
    torch.set_num_threads(1)  # and no other thread, so that forking is safe
    return {key: _measure_apart(key, request) for key in request["contenders"]}


def _measure_apart(key: str, request: dict[str, Any]) -> int | None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(writer, str(_measure(key, request)).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return int(text) if text else None


def _measure(key: str, request: dict[str, Any]) -> int:
    """Peak resident bytes beyond those of the interpreter and torch."""
    case, tiny = CASES[request["case"]], CASES["tiny"]
    contender, small = ({c.key: c for c in list_contenders(case)}[key] for case in (case, tiny))
    _run_once(small, tiny, {**request, "batch": 2}, lower=False)  # imports and first-call buffers
    _lower_high_water()
    before = _high_water()
    _run_once(contender, case, request, lower=True)
    return _high_water() - before


def _run_once(contender: Contender, case: Case, request: dict[str, Any], *, lower: bool) -> None:
    dtype, device = getattr(torch, request["dtype"]), torch.device("cpu")
    module = make_module(contender, case, dtype, device)
    (x, *_), upstream = make_inputs(case, request["batch"], dtype, request["layout"], device)
    run = make_pass(module, list(module.parameters()), "both", upstream)
    if lower:
        _lower_high_water()
    run(x)


def _high_water() -> int:
    """Peak resident bytes of this process; getrusage would begin with those of the parent."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1))


def _lower_high_water() -> None:
    """Begin the peak anew, so that the making of a module does not count; where that is not allowed, it does."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return
