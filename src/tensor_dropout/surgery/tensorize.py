"""``tensorize_``: the head of a trained network becomes a tensor regression that computes the same function."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.contraction import multiply_along
from tensor_dropout.layers.decomposition import Decomposition, Ranks
from tensor_dropout.layers.dropout import TensorDropout, as_dropout
from tensor_dropout.layers.formats import Format, get_format
from tensor_dropout.layers.head_outputs import count_parameters
from tensor_dropout.layers.ranks import Rank
from tensor_dropout.layers.regression import TensorRegression, unwarned
from tensor_dropout.surgery.checks import check_example, check_layer, check_model
from tensor_dropout.surgery.exchange import Exchange, exchange_parameters, undone_on_failure
from tensor_dropout.surgery.find_head import (
    Seen,
    Trace,
    at_rest,
    average_first,
    choose_heads,
    describe_module,
    is_linear_like,
    run,
    trace,
)
from tensor_dropout.surgery.head import Pooled, TensorHead, widen
from tensor_dropout.surgery.rank_choice import Goal, choose_ranks
from tensor_dropout.surgery.report import ConversionReport, Replacement, Trial
from tensor_dropout.surgery.weights import relative_error


def tensorize_(
    model: nn.Module,
    example_input: Any,
    *,
    factorization: str = "tucker",
    rank: Rank | None = None,
    max_parameters: int | None = None,
    max_error: float | None = None,
    max_accuracy_loss: float | None = None,
    loader: Iterable[Any] | None = None,
    dropout: TensorDropout | float | None = None,
    heads: str | Sequence[str] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> ConversionReport:
    """Replace the head of a trained network by a tensor regression, in place.

    Average pooling + ``Linear(C -> O)`` of weight F is the regression ``W[c,h,w,o] = F[o,c] / (H·W)``: exact at rank
    min(C, O), with the dense W never formed. Flattening + ``Linear`` is one as it stands. The network then computes
    what it did (up to the error of the rank), and fine-tunes with tensor dropout; :func:`merge_` goes back.

    The head is found by running the model once, in ``eval`` mode: the linear layer (or 1×1 convolution) that is fed by
    an averaged or flattened map, else the last linear layer, over its features. Pooling is widened to the map's size,
    so that other input sizes still run. Pooling that is a function inside ``forward`` stays, and the regression is over
    the averaged features; the report says so.

    Args:
        model: any network; it must not be wrapped (DDP, FSDP, ``torch.compile``) yet.
        example_input: an input as the model takes it: a tensor, a tuple of arguments or a dict of keyword arguments.
        factorization: the format of the new weight: "tucker", "cp", "tt" or another that ``layers/formats.py`` lists.
        rank: "full" (default): the weight's own exact rank. One int: that rank in every mode, cut at the exact one (CP:
            its one rank). A sequence: exact ranks; ranks above the weight's own are added with zeros, so that training
            can grow into them. A float in (0, 1]: at most that fraction of the replaced layer's weights.
        max_parameters: instead of ``rank``: the largest rank with at most so many parameters, bias included.
        max_error: instead of ``rank``: the smallest rank whose weight is off by at most this, ``‖W - Ŵ‖/‖W‖``.
        max_accuracy_loss: instead of ``rank``: the smallest rank found by bisection whose accuracy on ``loader`` is at
            most this much (a fraction, 0.01 is one point) below the unchanged network's.
        loader: batches ``(x, y)`` of inputs and class numbers for ``max_accuracy_loss``; not the test set.
        dropout: a :class:`TensorDropout` for the new layer; a number is the KEEP probability θ.
        heads: the name of the layer to replace, or several names, instead of the search.
        filter_fn: ``filter_fn(module, name)`` picks layers instead of the search; all that it accepts are replaced.
        optimizer: gets the new parameters where the old ones were; the state of all others stays. An optimizer that
            was made before and is not passed goes on with the old parameters: the new ones are then not trained.

    Returns:
        What was replaced, parameters before and after, the weight's error and the measured change of the output.

    Raises:
        TensorDropoutError: if no head or several were found, a layer cannot be converted, or a setting is impossible;
            the model and the optimizer are then as they were.

    Example:
        >>> import torch, tensor_dropout as td
        >>> net = torch.nn.Sequential(
        ...     torch.nn.Conv2d(3, 16, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 10)
        ... ).eval()
        >>> x = torch.randn(2, 3, 8, 8)
        >>> before = net(x)
        >>> report = td.tensorize_(net, x, dropout=0.8)
        >>> bool(torch.allclose(net(x), before, atol=1e-5)), report.replacements[0].rank
        (True, (10, 1, 1, 10))
    """
    goal = Goal.of(rank, max_parameters, max_error, max_accuracy_loss, loader)
    format = get_format(factorization, "tensorize_", "factorization")
    dropout = as_dropout(dropout)
    check_model(model, "tensorize_")
    check_example(model, example_input)
    devices = list({parameter.device for parameter in model.parameters()})
    counted = count_parameters(model)
    with undone_on_failure(model, optimizer) as exchange, at_rest(model, devices):
        traced = trace(model, example_input)
        chosen = pick(model, traced, heads, filter_fn)
        for seen in chosen:
            check_layer(model, seen)
        before = [tensor.detach().clone() for tensor in traced.output]
        request = Request(format, goal, dropout, example_input, before)
        done = [convert(model, seen, request, exchange, optimizer) for seen in chosen]
        difference = measure(model, example_input, before)
    for old, new in exchange.modules.values():
        new.train(old.training)
    return ConversionReport(tuple(done), counted, count_parameters(model), difference, exchange.modules)


def pick(
    model: nn.Module,
    traced: Trace,
    heads: str | Sequence[str] | None,
    filter_fn: Callable[[nn.Module, str], bool] | None,
) -> list[Seen]:
    """The layers to replace: those named, those that the filter accepts, or the one head that the search finds."""
    known = {name: module for name, module in model.named_modules(remove_duplicate=False) if is_linear_like(module)}
    listed = "; ".join(seen.describe() for seen in traced.seen) or f"no linear layer; last ran {list(traced.other)}"
    if heads is not None and filter_fn is not None:
        raise TensorDropoutError("tensorize_: pass heads= or filter_fn=, not both")
    if heads is not None:
        names = [heads] if isinstance(heads, str) else list(heads) if isinstance(heads, Sequence) else [heads]
        if not names or not all(isinstance(name, str) for name in names):
            raise TensorDropoutError(f"tensorize_: heads is a name or several, got {heads!r}")
        if unknown := [name for name in names if name not in known]:
            raise TensorDropoutError(
                f"tensorize_: heads names {unknown}, but the model's linear layers are {list(known)}"
            )
        return [_find(traced, name, known[name], listed) for name in dict.fromkeys(names)]
    if filter_fn is not None:
        accepted = [seen for seen in traced.seen if filter_fn(seen.module, seen.name)]
        if not accepted:
            raise TensorDropoutError(f"tensorize_: filter_fn accepted no layer; those that ran are: {listed}")
        return accepted
    found = choose_heads(traced)
    done = [name for name, module in model.named_modules() if isinstance(module, TensorRegression)]
    if not found and done:
        raise TensorDropoutError(
            f"tensorize_: found no head in {type(model).__name__}: {done} is a tensor regression already; use "
            "truncate_ for another rank, or merge_ first"
        )
    if not found:
        raise TensorDropoutError(
            f"tensorize_: found no head in {type(model).__name__}: a linear layer or 1×1 convolution on averaged, "
            f"flattened or plain features. What ran: {listed}. Name one with heads="
        )
    if len(found) > 1:
        raise TensorDropoutError(
            f"tensorize_: {type(model).__name__} has {len(found)} heads: {'; '.join(s.describe() for s in found)}. "
            f"Name one, or several, with heads={[seen.name for seen in found]}"
        )
    return found


def _find(traced: Trace, name: str, module: nn.Module, listed: str) -> Seen:
    for seen in traced.seen:
        if seen.module is module:
            return replace(seen, name=name)
    raise TensorDropoutError(f"tensorize_: {name!r} did not run on example_input; what ran: {listed}")


@dataclass(frozen=True)
class Request:
    """What all replacements of one call share."""

    format: Format
    goal: Goal
    dropout: TensorDropout | None
    example: Any
    before: list[Tensor]


def convert(
    model: nn.Module,
    seen: Seen,
    request: Request,
    exchange: Exchange,
    optimizer: torch.optim.Optimizer | None,
) -> Replacement:
    """Replace one layer."""
    weight, bias = read_weight(seen)
    if seen.is_averaged:
        settle(model, seen, request, exchange)
    decomposition = decompose(weight, seen, request.format)
    regression, trials = fit(model, seen, decomposition, bias, request, exchange)
    swap(seen, regression, exchange)
    if failure := probe(model, regression, request):
        raise TensorDropoutError(f"tensorize_: {seen.name!r} cannot be replaced: {failure}; name another with heads=")
    if optimizer is not None:
        named = [(f"{seen.name}.regression.{name}", p) for name, p in regression.named_parameters()]
        new = [(name, parameter) for name, parameter in named if parameter is not bias]
        kept = [(name, parameter) for name, parameter in named if parameter is bias]
        exchange_parameters(optimizer, [seen.module.get_parameter("weight")], new, "tensorize_", kept)
    return Replacement(
        name=seen.name,
        kind=seen.kind,
        before=describe_module(seen.module) + (f" behind {type(seen.pooling).__name__}" if seen.pooling else ""),
        after=type(regression).__name__,
        input_shape=regression.input_shape,
        output_shape=regression.output_shape,
        rank=regression._ranks,
        parameters_before=count_parameters(seen.module),
        parameters_after=count_parameters(regression),
        relative_error=relative_error(weight, regression, averaged=seen.is_averaged),
        notes=_notes(seen, regression),
        trials=trials,
    )


def settle(model: nn.Module, seen: Seen, request: Request, exchange: Exchange) -> None:
    """See whether the network computes the same with its pooling widened; if not, the pooling stays.

    Tried with a head that averages and then calls the old layer: any change is due to something else that uses the
    averaged features, or to what stands between. In training, the network must return the same shapes: it may return
    the averaged features only there.
    """
    mark = len(exchange)
    trial = Averaging(seen.module, seen.features)
    shapes = shapes_in_training(model, request.example)
    widen_pooling(seen, exchange)
    exchange.put(seen.module, trial)
    failure = probe(model, trial, request, equal=True)
    if not failure and shapes is not None and shapes_in_training(model, request.example) != shapes:
        failure = "in training mode it returns another shape"
    exchange.undo(mark)
    if failure and seen.kind == "conv-pool":
        raise TensorDropoutError(f"tensorize_: {seen.name!r} cannot be replaced: {failure}; name another with heads=")
    if failure:
        average_first(seen, f"the network does not compute the same with its pooling widened ({failure})")


@torch.no_grad()
def shapes_in_training(model: nn.Module, example: Any) -> list[torch.Size] | None:
    """What the model returns in ``train`` mode, or None if it does not run so; it is left as it was."""
    with at_rest(model, list({parameter.device for parameter in model.parameters()})):
        model.train()
        try:
            return [tensor.shape for tensor in run(model, example)]
        except TensorDropoutError:
            return None


class Averaging(nn.Module):
    """The old layer behind an average of the map that a tensor head would get."""

    def __init__(self, layer: nn.Module, features: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.features = layer, features

    def forward(self, x: Tensor) -> Tensor:
        """(B, C·H·W) or (B, C, H, W), as the layer's input comes."""
        space = tuple(range(2, 1 + len(self.features)))
        if x.ndim == 2:
            return self.layer(x.unflatten(1, self.features).mean(space))
        return self.layer(x.mean(space, keepdim=True))


def probe(model: nn.Module, head: nn.Module, request: Request, *, equal: bool = False) -> str:
    """Run the changed model: the head must be reached, and the outputs keep their shapes; else why not.

    Args:
        model: with the head in its place.
        head: what must be reached.
        request: the example, and the outputs before.
        equal: whether the outputs must also keep their values, up to rounding.
    """
    reached: list[bool] = []
    hook = head.register_forward_hook(lambda *_: reached.append(True))
    try:
        with torch.no_grad():
            after = run(model, request.example)
    except TensorDropoutError as failure:
        return str(failure.__cause__ or failure).strip().splitlines()[0][:160]
    finally:
        hook.remove()
    if not reached:
        return "the model calls it by a reference that is not registered as a submodule"
    if [tensor.shape for tensor in after] != [tensor.shape for tensor in request.before]:
        return f"the output changes its shape to {[tuple(tensor.shape) for tensor in after]}"
    for found, before in zip(after, request.before, strict=True) if equal else ():
        rough = {torch.float64: 1e-8, torch.float32: 1e-3}.get(before.dtype, 5e-2)
        if before.numel() and float((found - before).abs().max()) > rough * float(before.abs().max()):
            return "something else uses the averaged features"
    return ""


def read_weight(seen: Seen) -> tuple[Tensor, nn.Parameter | None]:
    """The weight as (inputs, O) in float64, and the bias, which the new layer takes over as it is."""
    weight = seen.module.get_parameter("weight").detach()
    weight = weight.cpu() if weight.device.type == "mps" else weight  # no float64 there
    matrix = weight.flatten(1).T.to(torch.float64)
    if not bool(torch.isfinite(matrix).all()):
        raise TensorDropoutError(f"tensorize_: the weight of {seen.name!r} has NaN or infinite entries")
    return matrix, seen.module._parameters.get("bias")


def decompose(matrix: Tensor, seen: Seen, format: Format) -> Decomposition:
    """The weight of a layer as it stands, or, behind an average, its matrix with the sizes of the map."""
    if seen.is_averaged:
        return format.decomposition(matrix, seen.features[1:])
    return format.decomposition(matrix.reshape(*seen.features, -1))


def fit(
    model: nn.Module,
    seen: Seen,
    decomposition: Decomposition,
    bias: nn.Parameter | None,
    request: Request,
    exchange: Exchange,
) -> tuple[TensorRegression, tuple[Trial, ...]]:
    """A regression of the rank that the goal asks for, filled; and the trials of the search for it."""
    weight = seen.module.get_parameter("weight")

    layer = request.format.layer
    shell = layer(seen.features, weight.shape[0], 1, device="meta")

    def build(rank: Rank, dropout: TensorDropout | None = None) -> TensorRegression:
        with unwarned():  # the report says if there is nothing to drop
            regression = layer(
                seen.features,
                weight.shape[0],
                rank,
                dropout=copy.deepcopy(dropout),
                bias=bias is not None,
                device="meta",
                dtype=weight.dtype,
            ).to_empty(device=weight.device)  # not drawn first: it is filled at once
        fill(regression, decomposition)
        regression.bias = bias
        return regression

    def error(ranks: Ranks) -> float:
        return relative_error(_matrix(decomposition), build(ranks), averaged=seen.is_averaged)

    def evaluate(ranks: Ranks | None, score: Callable[[nn.Module], float]) -> float:
        mark = len(exchange)
        if ranks is not None:
            swap(seen, build(ranks), exchange)
        try:
            return score(model)
        finally:
            exchange.undo(mark)

    goal = request.goal
    rank, trials, note = choose_ranks(goal, decomposition, shell._count, error, evaluate, weight.numel(), bias)
    seen.note = "; ".join(filter(None, (seen.note, note)))
    return build(rank, request.dropout), trials


def _matrix(decomposition: Decomposition) -> Tensor:
    return decomposition.weight.flatten(0, -2)


@torch.no_grad()
def fill(regression: TensorRegression, decomposition: Decomposition) -> None:
    """Write the decomposition into a layer so that its ``dense_weight()``, the weight at test time, is W."""
    operands = regression.operands()
    found = decomposition.fill(operands, regression._ranks)
    _, indices, _, ranks = regression._indices()
    for axis, mean in enumerate(regression.mean_masks()):
        if mean is None:
            continue
        if not bool((mean > 0).all()):
            raise TensorDropoutError("tensorize_: with scaling='paper' the law must keep every rank sometimes")
        # The paper's scaling multiplies by E[c] at test time: divide once, in the last operand that has this axis.
        last = max(n for n, index in enumerate(indices) if ranks[axis] in index)
        position = indices[last].index(ranks[axis])
        found[last] = multiply_along(found[last], 1 / mean.to(found[last]), position)
    for operand, value in zip(operands, found, strict=True):
        operand.copy_(value)


def swap(seen: Seen, regression: TensorRegression, exchange: Exchange) -> None:
    """Put the regression where the layer was, and widen its pooling."""
    pooled = widen_pooling(seen, exchange)
    exchange.put(seen.module, TensorHead(regression, seen.kind, len(seen.input_shape) - 2, pooled))


def widen_pooling(seen: Seen, exchange: Exchange) -> Pooled | None:
    """Exchange the pooling in front of a layer, if a module averages there."""
    if seen.pooling is None:
        return None
    pooled = widen(seen.pooling, seen.kind, seen.features[1:], flattens=not seen.pooled_axes)
    exchange.put(seen.pooling, pooled.now)
    return pooled


def _notes(seen: Seen, regression: TensorRegression) -> tuple[str, ...]:
    notes = [seen.note] if seen.note else []
    notes += [_describe_dropout(name, seen) for name in seen.dropouts]
    if seen.is_averaged:
        grid = "×".join(map(str, seen.features[1:]))
        notes.append(f"maps of another size than {grid} are averaged to {grid} first")
    if regression.dropout is not None and not regression.dropped_axes:
        notes.append(
            f"the dropout has nothing to drop at rank {regression._ranks}, since modes of rank 1 are skipped; ask for "
            "higher ranks: the function stays the same"
        )
    if regression.dropout is not None and regression.dropout.at_test == "sample":
        notes.append("at_test='sample': the output was compared at the mean of the masks")
    return tuple(notes)


def _describe_dropout(name: str, seen: Seen) -> str:
    """What becomes of a plain dropout beside an average that moved to its other side."""
    times = f"up to √{prod(seen.features[1:])} times"
    what = (
        f"dropped single averages in training and now drops single entries of the map, a noise {times} smaller"
        if seen.kind == "pool"
        else f"dropped single entries of the map in training and now drops single averages, a noise {times} larger"
    )
    channels = f"nn.Dropout{len(seen.features) - 1}d"
    return f"{name} {what}; remove it and use tensor dropout, or {channels} on the map, which drops whole channels"


@torch.no_grad()
def measure(model: nn.Module, example: Any, before: list[Tensor]) -> float | None:
    """``max |after - before| / max |before|`` over all tensors that the model returns, at the mean of the masks.

    None if it returns none that could be compared.
    """
    layers = [module for module in model.modules() if isinstance(module, TensorRegression)]
    kept = [layer._fixed_masks for layer in layers]
    for layer in layers:
        layer._fixed_masks = layer.mean_masks()
    try:
        after = run(model, example)
    finally:
        for layer, masks in zip(layers, kept, strict=True):
            layer._fixed_masks = masks
    pairs = [(a.double(), b.double()) for a, b in zip(after, before, strict=True) if b.is_floating_point()]
    if not pairs:
        return None
    scale = max((float(b.abs().max()) for _, b in pairs if b.numel()), default=0.0)
    change = max((float((a - b).abs().max()) for a, b in pairs if b.numel()), default=0.0)
    return change / scale if scale > 0 else change
