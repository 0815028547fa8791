"""``merge_``: tensor regressions become plain torch layers; ``truncate_``: they keep their leading ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.contraction import multiply_along
from tensor_dropout.layers.head_outputs import count_parameters
from tensor_dropout.layers.regression import TensorRegression
from tensor_dropout.surgery.checks import check_hooks, check_model, check_tied
from tensor_dropout.surgery.exchange import Exchange, exchange_parameters, names_of, undone_on_failure
from tensor_dropout.surgery.head import POOLINGS, TensorHead, pool_to
from tensor_dropout.surgery.report import ConversionReport, Replacement
from tensor_dropout.surgery.weights import as_network, averaged_weight, inner, is_average, whole_weight

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def merge_(model: nn.Module, *, optimizer: torch.optim.Optimizer | None = None) -> ConversionReport:
    """Replace every tensor regression by plain torch layers that compute its ``eval`` function, in place.

    Where the weight is constant over the spatial modes (a converted pooled head, not trained on), the pooling and the
    linear layer come back as they were; else a linear layer on the flattened map. What is left needs nothing of this
    library; the dropout is gone, and a center is in the bias.

    Args:
        model: a network that contains tensor regressions.
        optimizer: gets the new weights where the factors were; the state of all others stays. An optimizer that was
            made before and is not passed goes on with the old factors: the new weights are then not trained.

    Returns:
        What was replaced; the error is that of rounding to the layer's dtype.

    Raises:
        TensorDropoutError: if there is nothing to merge, the model is wrapped, or a bias has a parametrization.

    Example:
        >>> import torch, tensor_dropout as td
        >>> net = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 10))
        >>> weight = net[2].weight.detach().clone()
        >>> _ = td.tensorize_(net, torch.randn(2, 16, 4, 4))
        >>> _ = td.merge_(net)
        >>> type(net[2]).__name__, bool(torch.allclose(net[2].weight, weight, atol=1e-6))
        ('Linear', True)
    """
    check_model(model, "merge_")
    regressions = _regressions(model, "merge_")
    heads = {id(head.regression): head for head in model.modules() if isinstance(head, TensorHead)}
    counted = count_parameters(model)
    with undone_on_failure(model, optimizer) as exchange:
        done = []
        for name, regression in regressions.items():
            head = heads.get(id(regression))
            _check_whole(model, head or regression, f"merge_: the layer {name!r}")
            if "bias" in parametrized(regression):
                raise _parametrized("merge_", name, ["bias"])
            plain, kind = _merge_bare(regression) if head is None else _merge_head(head, exchange)
            where = head or regression
            plain.train(where.training)
            pooled = head is not None and head.kind in ("pool", "conv-pool")
            done.append(_describe(names_of(model, where)[0], regression, plain, kind, pooled=pooled))
            exchange.put(where, plain)
            if optimizer is not None:
                _patch(optimizer, names_of(model, plain)[0], regression, plain, "merge_")
    return ConversionReport(tuple(done), counted, count_parameters(model), None, exchange.modules)


def _regressions(model: nn.Module, where: str) -> dict[str, TensorRegression]:
    if isinstance(model, TensorRegression):
        raise TensorDropoutError(
            f"{where}: the model is the layer itself; put it into nn.Sequential to change it there"
        )
    found = {name: module for name, module in model.named_modules() if isinstance(module, TensorRegression)}
    if not found:
        raise TensorDropoutError(f"{where}: {type(model).__name__} has no tensor regression layer")
    return found


def parametrized(regression: TensorRegression) -> list[str]:
    """The parameters of a layer that have a parametrization: ``core``, ``factors.0``, ``bias``."""
    return [
        f"{place}.{name}".removeprefix(".")
        for place, module in regression.named_modules()
        if parametrize.is_parametrized(module)
        for name in module.parametrizations
    ]


def _parametrized(where: str, name: str, which: list[str]) -> TensorDropoutError:
    return TensorDropoutError(
        f"{where}: the layer {name!r} has a parametrization of {which}, which could not be kept; make it permanent "
        "with torch.nn.utils.parametrize.remove_parametrizations first"
    )


def _check_whole(model: nn.Module, module: nn.Module, where: str) -> None:
    check_hooks(module, where)
    if isinstance(module, TensorHead) and module.pooled is not None:
        check_hooks(module.pooled.now, where)
    check_tied(model, module, where)


def _merge_head(head: TensorHead, exchange: Exchange) -> tuple[nn.Module, str]:
    """The plain layer for a head that surgery made, and its pooling as it was if the weight is still an average."""
    regression, axes = head.regression, head.axes
    grid = regression.input_shape[1:]
    averages = head.kind == "conv-pool"
    restorable = averages or (head.pooled is not None and bool(names_of(exchange.model, head.pooled.now)))
    if grid and restorable and is_average(regression):
        if head.pooled is not None:
            head.pooled.before.train(head.pooled.now.training)
            exchange.put(head.pooled.now, head.pooled.before)
        return _plain(regression, averaged_weight(regression), (1,) * axes), "pool"
    plain = _plain(regression, whole_weight(regression), grid if axes and grid else (1,) * axes)
    return (nn.Sequential(pool_to(grid), plain) if averages else plain), "flatten" if grid else "features"


def _merge_bare(regression: TensorRegression) -> tuple[nn.Module, str]:
    """Plain layers for a regression that takes a map as it is."""
    steps: list[nn.Module] = []
    space = len(regression.input_shape) - 1
    kind = "features"
    if space in POOLINGS and is_average(regression):
        kind, steps = "pool", [pool_to((1,) * space), nn.Flatten(1)]
        linear = _plain(regression, averaged_weight(regression), ())
    else:
        kind, steps = ("flatten", [nn.Flatten(1)]) if space else ("features", [])
        linear = _plain(regression, whole_weight(regression), ())
    after = [nn.Unflatten(1, regression.output_shape)] if len(regression.output_shape) > 1 else []
    steps = [*steps, linear, *after]
    return (nn.Sequential(*steps) if len(steps) > 1 else linear), kind


@torch.no_grad()
def _plain(regression: TensorRegression, weight: Tensor, kernel: tuple[int, ...]) -> nn.Module:
    """A linear layer, or a convolution with this kernel, of the weight (*inputs, *output_shape)."""
    like = next(regression.parameters())
    outputs = prod(regression.output_shape)
    rows = weight.reshape(-1, outputs).T
    bias = _centered_bias(regression)
    options = {"bias": bias is not None, "device": "meta", "dtype": like.dtype}
    plain: nn.Module
    if kernel:
        plain = CONVOLUTIONS[len(kernel)](rows.shape[1] // prod(kernel), outputs, kernel, **options)  # type: ignore[arg-type]
    else:
        plain = nn.Linear(rows.shape[1], outputs, **options)  # type: ignore[arg-type]
    plain = plain.to_empty(device=like.device)  # made without drawing: the generator stays where it is
    plain.get_parameter("weight").copy_(rows.reshape(plain.get_parameter("weight").shape))
    factors = (parameter for parameter in regression.parameters() if parameter is not regression.bias)
    plain.get_parameter("weight").requires_grad_(any(factor.requires_grad for factor in factors))
    if bias is not None and regression.center is None and bias.ndim == 1:
        plain.register_parameter("bias", regression.bias)  # the same parameter: an optimizer keeps its state
    elif bias is not None:
        plain.get_parameter("bias").copy_(bias.flatten())
        trained = plain.get_parameter("weight") if regression.bias is None else regression.bias
        plain.get_parameter("bias").requires_grad_(trained.requires_grad)
    return plain


def _centered_bias(regression: TensorRegression) -> Tensor | None:
    """``b - ⟨center, W⟩``, in float64; without a center the bias itself."""
    if regression.center is None:
        return regression.bias
    summed = averaged_weight(regression)  # (C, *output_shape)
    shift = torch.tensordot(regression.center.to(summed), summed, dims=1)
    return -shift if regression.bias is None else regression.bias.to(shift) - shift


def _describe(name: str, regression: TensorRegression, plain: nn.Module, kind: str, *, pooled: bool) -> Replacement:
    """What was merged; ``pooled``: into a head that tensorize_ made of pooling and a linear layer."""
    matrix = averaged_weight(regression) if kind == "pool" else whole_weight(regression)
    merged = next(p for p in plain.parameters() if p.ndim > 1).detach().flatten(1).T.to(matrix)
    norm = matrix.norm()
    notes = ["the tensor dropout is gone: the mean weight is left"] if regression.dropped_axes else []
    notes += ["the center is in the bias"] if regression.center is not None else []
    if kind == "flatten" and pooled:
        grid = "×".join(map(str, regression.input_shape[1:]))
        notes.append(
            f"the weight is not constant over the {grid} positions any more, so the layer takes the flattened map: its "
            f"pooling stays at {grid}, and its weights do not fit the network as it was before tensorize_"
        )
    return Replacement(
        name=name,
        kind=kind,
        before=type(regression).__name__,
        after=" + ".join(type(m).__name__ for m in plain.modules() if not isinstance(m, nn.Sequential)),
        input_shape=regression.input_shape,
        output_shape=regression.output_shape,
        rank=regression._ranks,
        parameters_before=count_parameters(regression),
        parameters_after=count_parameters(plain),
        relative_error=float((merged - matrix.reshape(merged.shape)).norm() / norm) if norm > 0 else 0.0,
        notes=tuple(notes),
    )


def _patch(optimizer: torch.optim.Optimizer, name: str, old: TensorRegression, new: nn.Module, where: str) -> None:
    kept = set(old.parameters()) & set(new.parameters())
    bias = None if old.bias is None or old.bias in kept else old.bias
    gone = [parameter for parameter in old.parameters() if parameter not in kept and parameter is not bias]
    fresh = [(f"{name}.{inner}", parameter) for inner, parameter in new.named_parameters() if parameter not in kept]
    stayed = [(f"{name}.{inner}", parameter) for inner, parameter in new.named_parameters() if parameter in kept]
    biases = [] if bias is None else [(name, parameter) for name, parameter in fresh if parameter.ndim == 1]
    weights = [(name, parameter) for name, parameter in fresh if bias is None or parameter.ndim > 1]
    exchange_parameters(optimizer, gone, weights, where, stayed)
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if bias is not None and (bias.requires_grad or bias in held):  # a frozen one need not be in the optimizer
        exchange_parameters(optimizer, [bias], biases, where)


def truncate_(
    model: nn.Module, rank: int | Sequence[int], *, optimizer: torch.optim.Optimizer | None = None
) -> ConversionReport:
    """Keep the leading ranks of every tensor regression, in place: what nested dropout trains for.

    The new layers are those that the old ones would be with all later ranks set to zero at test time. After
    :func:`tensorize_` the leading ranks are the largest singular directions; after training with ``law="nested"``,
    those that were kept most often; after other training their order means little.

    Args:
        model: a network that contains tensor regressions.
        rank: one int, cut at each axis' own rank; or one rank per axis, for a model with one tensor regression.
        optimizer: gets the new parameters where the old ones were; the state of all others stays. An optimizer that
            was made before and is not passed goes on with the old parameters: the new ones are then not trained.

    Returns:
        What was replaced; the relative error is that of the weight.

    Raises:
        TensorDropoutError: if there is no tensor regression, a rank is not between 1 and the layer's own, or a
            parameter has a parametrization.

    Example:
        >>> import torch, tensor_dropout as td
        >>> net = torch.nn.Sequential(td.CPRegression((16, 4, 4), 10, rank=12))
        >>> report = td.truncate_(net, 4)
        >>> net[0].rank, report.replacements[0].parameters_after
        (4, 146)
    """
    check_model(model, "truncate_")
    regressions = _regressions(model, "truncate_")
    if type(rank) is not int and (not isinstance(rank, Sequence) or isinstance(rank, str)):
        raise TensorDropoutError(
            f"truncate_: rank is between 1 and the layer's own, an integer or one per axis, got {rank!r}"
        )
    if len(regressions) > 1 and not isinstance(rank, int):
        raise TensorDropoutError(
            f"truncate_: the model has {len(regressions)} tensor regressions, so rank is one int, got {rank!r}"
        )
    counted = count_parameters(model)
    with undone_on_failure(model, optimizer) as exchange:
        done = []
        for name, regression in regressions.items():
            _check_whole(model, regression, f"truncate_: the layer {name!r}")
            if which := parametrized(regression):
                raise _parametrized("truncate_", name, which)
            short = _shorten(regression, rank)
            whole, left = as_network(regression), as_network(short)
            norm, rest = inner(whole, whole), inner(whole, whole) - 2 * inner(whole, left) + inner(left, left)
            done.append(
                Replacement(
                    name=name,
                    kind="truncation",
                    before=type(regression).__name__,
                    after=type(short).__name__,
                    input_shape=regression.input_shape,
                    output_shape=regression.output_shape,
                    rank=short._ranks,
                    parameters_before=count_parameters(regression),
                    parameters_after=count_parameters(short),
                    relative_error=(max(0.0, rest) / norm) ** 0.5 if norm > 0 else 0.0,
                )
            )
            exchange.put(regression, short)
            if optimizer is not None:
                _patch(optimizer, name, regression, short, "truncate_")
    return ConversionReport(tuple(done), counted, count_parameters(model), None, exchange.modules)


@torch.no_grad()
def _shorten(regression: TensorRegression, rank: int | Sequence[int]) -> TensorRegression:
    """The same layer with its leading ranks alone."""
    own = regression._ranks
    ranks = tuple(min(rank, R) for R in own) if type(rank) is int else tuple(rank)  # type: ignore[arg-type]
    fits = len(ranks) == len(own) and all(type(R) is int and 1 <= R <= most for R, most in zip(ranks, own, strict=True))
    if not fits:
        raise TensorDropoutError(
            f"truncate_: rank is between 1 and the layer's own {own}: {len(own)} numbers or one, got {rank!r}"
        )
    _, indices, _, letters = regression._indices()
    short = regression.with_rank(ranks)
    kept = dict(zip(letters, ranks, strict=True))
    values = []
    for operand, index in zip(regression.operands(), indices, strict=True):
        values.append(operand[tuple(slice(kept.get(letter)) for letter in index)].clone())
    for axis, (before, after) in enumerate(zip(regression.mean_masks(), short.mean_masks(), strict=True)):
        if before is not None:  # the paper's scaling: E[c] may depend on the rank, and a rank of 1 is not dropped
            last = max(n for n, index in enumerate(indices) if letters[axis] in index)
            ratio = before[: ranks[axis]].to(values[last]) / (1 if after is None else after.to(values[last]))
            values[last] = multiply_along(values[last], ratio, indices[last].index(letters[axis]))
    for operand, value in zip(short.operands(), values, strict=True):
        operand.copy_(value)
    for name, parameter in short.named_parameters():  # what was frozen stays frozen
        parameter.requires_grad_(regression.get_parameter(name).requires_grad)
    short.bias = regression.bias
    return short
