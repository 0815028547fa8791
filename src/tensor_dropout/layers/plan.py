"""How ``output = ⟨x, W⟩`` is computed: planned once, when a layer is made, and run as a few matrix products.

This file searches the plan; :mod:`tensor_dropout.layers.contraction` runs it.

With W in factors, ⟨x, W⟩ is a tensor network. x absorbs its parameters one after another, or several small ones
merged into one matrix (the Kronecker product of spatial factors), so that the features are read once. The planner
searches all such sequences, together with the order of the running tensor's axes in memory, for the least time of a
forward and a backward pass. Three rules:

- No rank is contracted before x has met it. opt_einsum plans more general trees, but there a rank may be summed
  between two parameters; it can then no longer be masked sample by sample, and θ = 1 would no longer run the very
  operations of the plain layer.
- The features are not copied, be they channels first or channels last (there is a plan for each), and their gradient
  comes back in their own layout.
- What is small may be copied: later on the running tensor or a parameter is put into the order that makes the
  product one plain matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from math import prod
from typing import Any, Literal, NamedTuple

FEW_OUTPUTS = 2
"""Up to so many outputs (regression, two classes) the dense weight is formed, unless there are masks per sample."""
INDICES = "abcdefghijklmnopqrstuvwxyABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_MODES = 12
TRIED = 200
"""How many states of the search are tried after each number of absorbed parameters: all up to about six modes, then the
cheapest, so that twelve modes are planned in seconds."""

# The cost model: nanoseconds in float32 on two cores of a Xeon with AVX-512 (only their ratios matter). A product of
# (m, k) with (k, n) takes MULTIPLY for each multiply-add, its sizes rounded up to whole TILEs, and MOVE for each
# number that it reads or writes; each of its two derivatives takes as long again.
PLANNED_BATCH = 32  # the batch assumed: it weighs activations against parameters
TILE = 16  # one vector register: a product with 9 columns takes as long as one with 16
MULTIPLY = 0.0072  # 140e9 multiply-adds a second in large products
MOVE = 0.1  # a number that a product streams through memory
ELEMENTWISE = 1.0  # a number multiplied and summed outside of matrix products, all passes together
PERMUTE = 0.7  # a number copied into another order, and its gradient copied back
OPERATION = 15_000.0  # starting one operation and its derivatives
ROW = 500.0  # starting one of the products of a batched product
MERGE = 50_000.0  # multiplying small parameters, and splitting the gradient between them
KEPT = 4  # a parameter is masked only if the running tensor is so many times larger: its masked copy is kept


@dataclass(frozen=True)
class Step:
    """The running tensor, (B, *axes) in some order, absorbs one parameter or several merged ones.

    Attributes:
        kind: how. "right": (.., k) @ (k, n), one product. "batched": (.., k, q) with (k, n), one product for each row
            of the axes in front. "turned": the same for (.., q, k). "multiply": element by element, then summed, for
            a rank that is shared and needed again (CP).
        operands: the positions of the parameters among the layer's operands.
        orders: for each, the order of its axes in the product of them all; empty if it is its own.
        shapes: for each, what broadcasts over that product.
        shape: of the product: (k, n), or for "multiply" what broadcasts over the running tensor.
        permute: the order into which the running tensor is copied first; empty if it is right already.
        view: the shape of the running tensor from the second axis on, for the product.
        n_last: "batched": whether n comes after q in the result.
        summed: "multiply": the axes that are summed.
        result: the indices of the result in the order of its axes, without the batch.
        sizes: their sizes.
        masked: (rank axis, its dimension in the result): the masks that multiply the result.
    """

    kind: Literal["right", "batched", "turned", "multiply"]
    operands: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    permute: tuple[int, ...]
    view: tuple[int, ...]
    n_last: bool
    summed: tuple[int, ...]
    result: str
    sizes: tuple[int, ...]
    masked: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Plan:
    """The steps for one layout of the features.

    Attributes:
        start: the features' axes in their order in memory; empty if they are in order.
        steps: the absorptions.
        finish: the axes of the last result in the order of the output, likewise.
        folds: for each rank axis where a mask of the whole batch is multiplied: (operand, dimension), or None if
            the running tensor is smaller.
        cost: what the model says of the steps.
    """

    start: tuple[int, ...]
    steps: tuple[Step, ...]
    finish: tuple[int, ...]
    folds: tuple[tuple[int, int] | None, ...]
    cost: float


class Plans(NamedTuple):
    """A plan for each layout of the features."""

    channels_first: Plan
    channels_last: Plan


@dataclass(frozen=True)
class Network:
    """A tensor network: indices of the features, of each parameter, of the output and of the rank axes."""

    inputs: str
    operands: tuple[str, ...]
    outputs: str
    ranks: str
    sizes: dict[str, int]
    batch: int = PLANNED_BATCH

    def size(self, indices: str) -> int:
        """The number of entries of a tensor with these indices."""
        return prod(self.sizes[i] for i in set(indices))

    def shape(self, indices: str) -> tuple[int, ...]:
        """The shape of a tensor with these indices."""
        return tuple(self.sizes[i] for i in indices)


def plan_contraction(
    inputs: str, operands: Sequence[str], outputs: str, ranks: str, sizes: dict[str, int], batch: int = PLANNED_BATCH
) -> Plans:
    """The fastest ways in which x absorbs its parameters.

    Args:
        inputs: the indices of x, without the batch; channels first.
        operands: the indices of each parameter.
        outputs: the indices of the result, without the batch.
        ranks: the index of each rank axis, in the layer's order.
        sizes: the size of each index.
        batch: the batch assumed.
    """
    return _plans(inputs, tuple(operands), outputs, ranks, tuple(sizes.items()), batch)


@lru_cache(maxsize=1024)
def _plans(
    inputs: str, operands: tuple[str, ...], outputs: str, ranks: str, sizes: tuple[tuple[str, int], ...], batch: int
) -> Plans:
    network = Network(inputs, operands, outputs, ranks, dict(sizes), batch)
    return Plans(_plan(network, inputs), _plan(network, inputs[1:] + inputs[:1]))


def _plan(network: Network, order: str) -> Plan:
    """The cheapest plan for features whose axes lie in memory in this order: the shortest path (Dijkstra)."""
    everything = (1 << len(network.operands)) - 1
    ticket = count()  # equal costs: first come, first served
    paths: list[tuple[float, int, int, str, tuple[Step, ...]]] = [(0.0, next(ticket), 0, order, ())]
    reached: set[tuple[int, str]] = set()
    tried = [0] * len(network.operands)  # how many states with so many absorbed parameters
    while True:
        cost, _, absorbed, held, steps = heappop(paths)
        if absorbed == everything:
            return _place_masks(network, order, steps, cost)
        level = absorbed.bit_count()
        if (absorbed, held) in reached or tried[level] == TRIED:
            continue
        reached.add((absorbed, held))
        tried[level] += 1
        for group in _groups(network, absorbed):
            for own, step in _ways(network, absorbed, held, group):
                after = absorbed | sum(1 << k for k in group)
                heappush(paths, (cost + own, next(ticket), after, step.result, (*steps, step)))


def _groups(network: Network, absorbed: int) -> Iterator[tuple[int, ...]]:
    """Parameters that can be absorbed at once: neighbours whose product contracts nothing and stays small."""
    results = network.batch * network.size(network.outputs)
    limit = max(results, *map(network.size, (network.inputs, *network.operands)))
    n = len(network.operands)
    for first in range(n):
        for last in range(first, n):
            group = tuple(range(first, last + 1))
            if absorbed >> last & 1:
                break
            inside = "".join(network.operands[k] for k in group)
            if last > first:
                outside = _waiting(network, absorbed | sum(1 << k for k in group)) + network.inputs
                contracts = any(inside.count(i) > 1 and i not in outside for i in inside)
                if contracts or network.size(inside) > limit:
                    break
            yield group


def _waiting(network: Network, absorbed: int) -> str:
    """The indices that are needed after these parameters."""
    later = (indices for k, indices in enumerate(network.operands) if not absorbed >> k & 1)
    return network.outputs + "".join(later)


def _ways(network: Network, absorbed: int, held: str, group: tuple[int, ...]) -> Iterator[tuple[float, Step]]:
    """All ways to absorb a group, with their costs."""
    own = _unique("".join(network.operands[k] for k in group))
    waiting = _waiting(network, absorbed | sum(1 << k for k in group))
    common = [i for i in own if i in held]
    if not common:
        return
    contracted = "".join(i for i in common if i not in waiting)
    if len(contracted) < len(common):
        yield _multiply(network, held, group, own, contracted)
        return
    new = "".join(i for i in own if i not in held)
    kept = "".join(i for i in held if i not in contracted)
    start = min(map(held.index, contracted))
    together = held[start : start + len(contracted)]
    if set(together) == set(contracted) and held.endswith(together):
        yield _right(network, held, group, held, together, new)
        yield _batched(network, group, "", together, new, kept, turned=True, n_last=False)
    elif set(together) == set(contracted):
        front, behind = held.split(together)
        for n_last in (True, False):
            yield _batched(network, group, front, together, new, behind, turned=False, n_last=n_last)
    if absorbed:  # not the features
        yield _right(network, held, group, kept + contracted, contracted, new)


def _right(
    network: Network, held: str, group: tuple[int, ...], order: str, contracted: str, new: str
) -> tuple[float, Step]:
    """(.., k) @ (k, n), the running tensor copied into the given order first if it is another."""
    kept = order[: len(order) - len(contracted)]
    k, n = network.size(contracted), network.size(new)
    cost = OPERATION + 3 * _product(network.batch * network.size(kept), k, n)
    cost += _parameter(network, group, contracted, new)
    permute = _permutation(held, order)
    if permute:
        cost += OPERATION + PERMUTE * network.batch * network.size(held)
    merge = _merge(network, group, contracted + new)
    result = kept + new
    return cost, Step("right", group, *merge, (k, n), permute, (k,), True, (), result, network.shape(result))


def _batched(
    network: Network,
    group: tuple[int, ...],
    front: str,
    contracted: str,
    new: str,
    behind: str,
    *,
    turned: bool,
    n_last: bool,
) -> tuple[float, Step]:
    """(.., k, q) or (.., q, k) with (k, n) -> (.., q, n) or (.., n, q)."""
    k, n, q = (network.size(indices) for indices in (contracted, new, behind))
    rows = network.batch * network.size(front)
    cost = OPERATION + 3 * rows * (ROW + _product(q, k, n)) + _parameter(network, group, contracted, new)
    result = front + (behind + new if n_last else new + behind)
    merge = _merge(network, group, contracted + new)
    kind: Literal["turned", "batched"] = "turned" if turned else "batched"
    view = (q, k) if turned else (k, q)
    return cost, Step(kind, group, *merge, (k, n), (), view, n_last, (), result, network.shape(result))


def _multiply(network: Network, held: str, group: tuple[int, ...], own: str, contracted: str) -> tuple[float, Step]:
    """Multiply element by element and sum: a rank that both have is needed again."""
    axes = held + "".join(i for i in own if i not in held)
    cost = 2 * OPERATION + ELEMENTWISE * network.batch * network.size(axes)
    cost += MERGE * (len(group) > 1)
    result = "".join(i for i in axes if i not in contracted)
    merge = _merge(network, group, "".join(i for i in axes if i in own))
    sizes = network.sizes
    shape = tuple(sizes[i] if i in own else 1 for i in axes)
    view = tuple(sizes[i] if i in held else 1 for i in axes)
    summed = tuple(1 + axes.index(i) for i in contracted)
    return cost, Step("multiply", group, *merge, shape, (), view, True, summed, result, network.shape(result))


def _product(m: int, k: int, n: int) -> float:
    """The time of (m, k) @ (k, n)."""
    tiles = prod(-(-size // TILE) * TILE for size in (m, k, n))
    return MULTIPLY * tiles + MOVE * (m * k + k * n + m * n)


def _parameter(network: Network, group: tuple[int, ...], contracted: str, new: str) -> float:
    """The time to bring the parameters into the form (k, n)."""
    if len(group) > 1:
        return MERGE + 2 * MOVE * network.size(contracted + new)
    own = network.operands[group[0]]
    return 0.0 if own in (contracted + new, new + contracted) else OPERATION + PERMUTE * network.size(own)


def _merge(network: Network, group: tuple[int, ...], axes: str) -> tuple[Any, Any]:
    """How each parameter of a group is ordered and shaped so that their product has these axes."""
    sizes = network.sizes
    owns = [network.operands[k] for k in group]
    orders = [tuple(own.index(i) for i in axes if i in own) for own in owns]
    orders = [() if order == tuple(range(len(order))) else order for order in orders]
    return tuple(orders), tuple(tuple(sizes[i] if i in own else 1 for i in axes) for own in owns)


def _unique(indices: str) -> str:
    return "".join(dict.fromkeys(indices))


def _permutation(held: str, order: str) -> tuple[int, ...]:
    """Of (batch, *held) to (batch, *order); empty if there is nothing to do."""
    return () if held == order else (0, *(1 + held.index(i) for i in order))


def _place_masks(network: Network, order: str, steps: tuple[Step, ...], cost: float) -> Plan:
    """Put each mask where it multiplies the fewest numbers: on a parameter (whole batch) or the running tensor."""
    masked: list[list[tuple[int, int]]] = [[] for _ in steps]
    folds: list[tuple[int, int] | None] = []
    for axis, r in enumerate(network.ranks):
        smallest, k = min((network.size(indices), k) for k, indices in enumerate(network.operands) if r in indices)
        fold = k, network.operands[k].index(r)
        places = [(network.size(step.result), k) for k, step in enumerate(steps) if r in step.result]
        if not places:  # it came with the features (a weight that is formed) and went at once
            folds.append(fold)
            continue
        running, place = min(places)
        masked[place].append((axis, 1 + steps[place].result.index(r)))
        folds.append(fold if KEPT * smallest < network.batch * running else None)
    return Plan(
        start=_permutation(network.inputs, order),
        steps=tuple(replace(step, masked=tuple(found)) for step, found in zip(steps, masked, strict=True)),
        finish=_permutation(steps[-1].result, network.outputs),
        folds=tuple(folds),
        cost=cost,
    )
