"""Times of passes: interleaved samples, on the CPU by the clock, on CUDA by events, eager or as one CUDA graph.

A pass is a function of one input buffer. On CUDA the passes of one sample go through many buffers, more than four
times the L2 cache in all, so that no input is found there; on the CPU there is one buffer.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Pass = Callable[[Tensor], Any]
Sample = Callable[[], float]

CPU_SAMPLE = 2e-3
"""The least seconds of work in one sample on the CPU."""
CUDA_SAMPLE = 1e-3
"""The same on CUDA."""
MAX_BUFFERS = 512
"""At most so many inputs, and passes in one CUDA graph; if they fit in the cache, it is emptied before each sample."""
GRAPH_SECONDS = 0.1
"""About how long one replay of a CUDA graph may take."""
MIN_ROUNDS = 3


def make_pass(
    call: Callable[[Tensor], Tensor], parameters: Sequence[nn.Parameter], kind: str, upstream: Tensor
) -> Pass:
    """``forward``: the output without a graph. ``both``: the gradients of x and of all parameters for ``upstream``.

    What a pass returns first, the output or the gradient of x, is kept by the CUDA graph for each buffer.
    """
    if kind == "forward":

        def run(x: Tensor) -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (call(x),)

    else:

        def run(x: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(call(x), (x, *parameters), upstream)

    return run


def make_capturable_pass(module: nn.Module, kind: str, upstream: Tensor) -> Pass:
    """The same for a CUDA graph, with leaves of its own in every call.

    A leaf remembers the stream on which it was first differentiated; if that is not the one that captures, the backward
    pass waits for it, and the capture fails.
    """
    if kind == "forward":
        return make_pass(module, [], kind, upstream)

    def run(x: Tensor) -> tuple[Tensor, ...]:
        leaves = {name: p.detach().requires_grad_() for name, p in module.named_parameters()}
        features = x.detach().requires_grad_()
        return torch.autograd.grad(functional_call(module, leaves, (features,)), (features, *leaves.values()), upstream)

    return run


def count_buffers(x_bytes: int, device: torch.device) -> int:
    """How many inputs a sample goes through."""
    if device.type != "cuda":
        return 1
    return max(2, min(MAX_BUFFERS, math.ceil(4 * cache_bytes() / x_bytes) + 1))


def cache_bytes() -> int:
    """The size of the GPU's L2 cache."""
    return int(getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 * 2**20))


def make_sampler(run: Pass, buffers: Sequence[Tensor], *, graph: bool) -> Sample:
    """A function that takes one sample: seconds per pass. Warms up first.

    Args:
        run: the pass.
        buffers: the inputs, equal in shape, on one device.
        graph: capture one pass per buffer in one CUDA graph.
    """
    if buffers[0].device.type != "cuda":
        return _sample_clock(run, buffers[0])
    return _sample_graph(run, buffers) if graph else _sample_events(run, buffers)


def _sample_clock(run: Pass, x: Tensor) -> Sample:
    def take(n_passes: int) -> float:
        began = time.perf_counter()
        for _ in range(n_passes):
            run(x)
        return (time.perf_counter() - began) / n_passes

    seconds = take(1)
    if seconds < 0.2:  # the first pass of a slower one is warm-up enough
        seconds = take(2)
    n_passes = max(1, math.ceil(CPU_SAMPLE / seconds))

    def sample() -> float:
        if seconds < 0.2:  # after another contender's seconds the caches are its own
            take(1)
        return take(n_passes)

    return sample


def _time_events(work: Callable[[], None]) -> float:
    """Seconds on the GPU, from an idle GPU to an idle GPU."""
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _sample_events(run: Pass, buffers: Sequence[Tensor]) -> Sample:
    turn = itertools.cycle(buffers)

    def work(n_passes: int) -> None:
        for x in itertools.islice(turn, n_passes):
            run(x)

    work(3)
    n_passes = max(3, math.ceil(CUDA_SAMPLE / (_time_events(lambda: work(3)) / 3)))
    return lambda: _time_events(lambda: work(n_passes)) / n_passes


def _sample_graph(run: Pass, buffers: Sequence[Tensor]) -> Sample:
    graph, kept = capture(run, buffers)
    graph.replay()
    n_replays = max(1, math.ceil(CUDA_SAMPLE / _time_events(graph.replay)))
    seen = sum(x.nbytes for x in buffers[: len(kept)])
    cold = torch.zeros(0 if seen >= 4 * cache_bytes() else cache_bytes(), device=buffers[0].device)  # 4 bytes each

    def work() -> None:
        for _ in range(n_replays):
            graph.replay()

    def sample() -> float:
        if cold.numel():
            cold.sum()  # reads four times the cache, and leaves nothing to be written back
        return _time_events(work) / (n_replays * len(kept))  # kept: what the graph writes to stays alive

    return sample


def capture(run: Pass, buffers: Sequence[Tensor]) -> tuple["torch.cuda.CUDAGraph", list[Tensor]]:
    """One CUDA graph with a pass per buffer, and the first result of each, so that results do not share memory.

    Fewer buffers where a replay would take more than GRAPH_SECONDS.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(buffers[0])
        seconds = _time_events(lambda: run(buffers[-1]))
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for x in buffers[: max(2, math.ceil(GRAPH_SECONDS / seconds))]:
            kept.append(run(x)[0])
    torch.cuda.synchronize()
    return graph, kept


def sample_in_turn(
    samplers: dict[str, Sample], repeats: int, seconds: float
) -> tuple[dict[str, list[float]], dict[str, Exception]]:
    """Rounds of one sample each, in turn: ``repeats`` of them, or fewer (three at least) once ``seconds`` are over.

    Returns:
        The seconds per pass of each sample, and the errors of those that failed.
    """
    times: dict[str, list[float]] = {key: [] for key in samplers}
    errors: dict[str, Exception] = {}
    began = time.perf_counter()
    for k in range(repeats):
        if k >= MIN_ROUNDS and time.perf_counter() - began > seconds:
            break
        for key in [key for key in samplers if key not in errors]:
            try:
                times[key].append(samplers[key]())
            except Exception as error:
                errors[key] = error
    return times, errors


def summarize(times: Sequence[float]) -> dict[str, Any]:
    """Median, smallest, largest and quartiles, in seconds."""
    quartiles = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [times[0]] * 3
    return {
        "median": statistics.median(times),
        "min": min(times),
        "max": max(times),
        "quartiles": [quartiles[0], quartiles[2]],
        "iqr": quartiles[2] - quartiles[0],
        "samples": len(times),
    }


def measure_bandwidth(device: torch.device, n_bytes: int) -> float:
    """Bytes per second of a large copy, read and written bytes both counted: the median of 9."""
    source = torch.zeros(n_bytes // 4, device=device)
    target = torch.empty_like(source)
    sample = _sample_ceiling(lambda: target.copy_(source), device)
    return 2 * source.nbytes / statistics.median(sample() for _ in range(9))


def measure_products(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Operations per second of a product of two square matrices: the median of 9."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    sample = _sample_ceiling(lambda: a @ b, device)
    return 2 * size**3 / statistics.median(sample() for _ in range(9))


def _sample_ceiling(work: Callable[[], Any], device: torch.device) -> Sample:
    nowhere = torch.empty(0, device=device)
    return make_sampler(lambda x: work(), [nowhere], graph=False)
