"""``attach_head``: a network up to one of its layers, and a fitted head on it, as one module."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tensor_dropout.calibration.model import ModelCalibration, carry_calibration
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.cut import HookedBackbone, cut, cut_or_hook
from tensor_dropout.features.layers import Place, join, plain_network
from tensor_dropout.features.probe import Wish, fixed_input, probe
from tensor_dropout.surgery.find_head import at_rest

DEFAULT_INPUT = (3, 224, 224)


class HeadedNetwork(nn.Module):
    """A backbone up to a layer, and a head on its map; made by :func:`td.attach_head`.

    Attributes:
        backbone: the network up to the layer, with the parameters of the network that was given.
        head: a tensor regression, or what else was fitted.
        places: the layers, and how their outputs become maps.
        pool: the grid that the maps are averaged to, or None.
        calibration: what held-out samples said of the estimator's errors, for these weights; None where it was fitted
            without.
    """

    def __init__(
        self, backbone: nn.Module, places: Sequence[Place], pool: tuple[int, ...] | None, head: nn.Module
    ) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head
        self.places, self.pool = tuple(places), pool
        self.calibration: ModelCalibration | None = None

    def forward(self, x: Tensor) -> Any:
        """(B, *input_shape) -> (B, *output_shape); (B, 1) where y was one number for each sample."""
        outputs = self.backbone(x)
        maps = [place.lay_out(output) for place, output in zip(self.places, outputs, strict=True)]
        return self.head(join(maps, self.pool).to(next(self.head.parameters()).dtype))

    def extra_repr(self) -> str:
        """The layers."""
        pool = f", pool={self.pool}" if self.pool else ""
        return ", ".join(repr(place.name) for place in self.places) + pool

    @property
    def is_cut(self) -> bool:
        """Whether what is behind the layer is gone, so that the network can be exported; else a hook ends it there."""
        return not isinstance(self.backbone, HookedBackbone)

    def where(self) -> dict[str, Any]:
        """Where the head is attached, as JSON types."""
        pool = None if self.pool is None else list(self.pool)
        return {"places": [place.as_json() for place in self.places], "pool": pool, "cut": self.is_cut}


def attach_head(
    model: Any,
    estimator: Any,
    layer: str | Sequence[str] | None = None,
    *,
    example_input: Tensor | None = None,
    pool: int | Sequence[int] | None = None,
    grid: Sequence[int] | None = None,
    channel_axis: int = 1,
) -> HeadedNetwork:
    """The network up to a layer and the fitted head on its map, as one module that trains end to end.

    In ``eval`` mode it gives what ``estimator.predict(FeatureMaps(model, layer).transform(x))`` does, in float32 to
    rounding: (B, 1) where y was one number for each sample, a classifier's logits in the order of ``classes_``. In
    ``train`` mode the head's tensor dropout draws masks; ``td.expected_mse``, ``td.predict`` and ``td.merge_`` go
    through it. Its inputs are those of the network: files are prepared as ``FeatureMaps`` does it.

    The estimator's calibration comes with it, if it has one: ``td.predict(headed, x, coverage=0.9)`` gives the
    intervals of ``predict_interval``, or the sets of ``predict_set``, and :func:`td.save` keeps them. It is for these
    weights: once the network was trained, merged or converted it is refused, and
    ``headed.calibration = td.calibrate(headed, x, y)`` on held-out samples makes a new one.

    What is behind the layer is cut off where torch.fx can trace the network so far (``is_cut``). Else a hook ends the
    forward pass there: this trains, is saved and loaded, but is not exported.

    Args:
        model: a network, or the ``FeatureMaps`` that the estimator was fitted on, whose settings are then taken. The
            parameters are shared: training changes the network that was given, and those that it has frozen
            (``requires_grad=False``) stay frozen.
        estimator: a fitted estimator of ``tensor_dropout.sklearn``, or a layer. It is copied.
        layer: as in ``FeatureMaps``; needed with a network.
        example_input: a batch such as the network takes, to find how the map lies; 3×224×224 without one. Not needed
            with a ``FeatureMaps`` that has been used.
        pool: as in ``FeatureMaps``.
        grid: as in ``FeatureMaps``.
        channel_axis: as in ``FeatureMaps``.

    Raises:
        TensorDropoutError: if the estimator is not fitted, the network has no such layer, or its map is not of the
            shape that the head takes.

    Example:
        >>> import tensor_dropout as td
        >>> network = nn.Sequential(nn.Conv2d(3, 8, 3, stride=8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
        >>> head = td.CPRegression((8, 8, 8), 2, rank=4, dropout=0.5)
        >>> headed = td.attach_head(network, head, "1", example_input=torch.zeros(1, 3, 64, 64))
        >>> headed(torch.zeros(5, 3, 64, 64)).shape, headed.is_cut
        (torch.Size([5, 2]), True)
    """
    head = _copy_head(estimator)
    wish = Wish(layer, pool, grid, channel_axis)
    input_shape: tuple[int, ...] = DEFAULT_INPUT
    if not isinstance(model, nn.Module) and hasattr(model, "transform"):
        model, wish, input_shape = _settings_of(model, wish)
    elif layer is None:
        raise TensorDropoutError(
            "attach_head: name the layer, or pass the FeatureMaps that the estimator was fitted on instead of the model"
        )
    if example_input is not None:
        input_shape = _sample_shape(example_input)
    network = plain_network(model, "attach_head")
    x = fixed_input(network, input_shape)
    with at_rest(network, [x.device]):
        probed = probe(network, x, wish, "attach_head")
        _check_fits(head, estimator, probed.map_shape, wish.layer)
        backbone = cut_or_hook(network, probed.places, x)
    headed = _put_together(network, backbone, probed.places, probed.pool, head.to(x.device))
    headed.calibration = carry_calibration(estimator, headed)
    return headed


def attach_again(network: nn.Module, recorded: dict[str, Any], head: nn.Module) -> HeadedNetwork:
    """A plain network with a head where :meth:`HeadedNetwork.where` says.

    Raises:
        TensorDropoutError: if the network has not these layers, or cannot be cut there.
    """
    places = [_read_place(place) for place in recorded["places"]]
    known, name = dict(network.named_modules(remove_duplicate=False)), type(network).__name__
    for place in places:
        if place.name not in known:
            raise TensorDropoutError(f"the head was attached at {place.name!r}, a layer that {name} has not")
    pool = None if recorded["pool"] is None else tuple(recorded["pool"])
    backbone: nn.Module
    try:
        backbone = cut(network, places) if recorded["cut"] else HookedBackbone(network, places)
    except Exception as error:  # whatever torch.fx meets in the user's forward
        words = (str(error).splitlines() or [""])[0]
        raise TensorDropoutError(f"{name} cannot be cut at {places[-1].name!r} as it was: {words}") from error
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    return _put_together(network, backbone, places, pool, head.to(device))


def _read_place(recorded: dict[str, Any]) -> Place:
    place = Place.from_json(recorded)
    numbers = (place.calls, place.skipped, place.channel_axis, *(place.grid or ()))
    if not all(type(number) is int for number in numbers) or not isinstance(place.key, int | str | None):
        raise ValueError(f"{recorded!r} is no place")
    return place


def _put_together(
    network: nn.Module, backbone: nn.Module, places: Sequence[Place], pool: tuple[int, ...] | None, head: nn.Module
) -> HeadedNetwork:
    """The module; what is new in it gets the mode of the network, whose layers keep their own."""
    headed = HeadedNetwork(backbone, places, pool, head)
    old = set(network.modules())
    for module in headed.modules():
        if module not in old:
            module.training = network.training
    return headed


def _copy_head(estimator: Any) -> nn.Module:
    layer = estimator if isinstance(estimator, nn.Module) else getattr(estimator, "layer_", None)
    if not isinstance(layer, nn.Module):
        name = type(estimator).__name__
        what = f"got a {name}; of a pipeline or a search, pass the estimator in it"
        if hasattr(estimator, "as_network"):  # ours
            what = f"this {name} is not fitted yet; call fit first"
        raise TensorDropoutError(
            f"attach_head: estimator is a fitted estimator of tensor_dropout.sklearn, or a layer; {what}"
        )
    return copy.deepcopy(layer).requires_grad_(True)


def _settings_of(maps: Any, wish: Wish) -> tuple[Any, Wish, tuple[int, ...]]:
    """The network, the layers and the shape of an input of a ``FeatureMaps``."""
    if wish != Wish():
        raise TensorDropoutError(
            "attach_head: the FeatureMaps says layer, pool, grid and channel_axis; leave them out, or pass its model"
        )
    layer = getattr(maps, "layer_", None) if maps.layer is None else maps.layer
    if layer is None:
        raise TensorDropoutError("attach_head: this FeatureMaps has not picked a layer yet; call its fit or transform")
    sizes = (maps.size, maps.size) if isinstance(maps.size, int) else tuple(maps.size)
    by_size = (3, *sizes) if len(sizes) == 2 else (1, *sizes)
    shape = getattr(maps, "input_shape_", by_size)
    return maps.model, Wish(layer, maps.pool, maps.grid, maps.channel_axis), shape


def _sample_shape(example_input: Any) -> tuple[int, ...]:
    if not isinstance(example_input, Tensor) or example_input.ndim not in (4, 5):
        got = tuple(example_input.shape) if isinstance(example_input, Tensor) else type(example_input).__name__
        raise TensorDropoutError(
            f"attach_head: example_input is a tensor (n, C, H, W[, D]), as the network takes it; got {got}"
        )
    return tuple(example_input.shape[1:])


def _check_fits(head: nn.Module, estimator: Any, map_shape: tuple[int, ...], layer: Any) -> None:
    expected = getattr(estimator, "input_shape_", getattr(head, "input_shape", None))
    if expected is not None and tuple(expected) != map_shape:
        raise TensorDropoutError(
            f"attach_head: the head takes maps of shape {tuple(expected)}, but the layer {layer!r} gives {map_shape}; "
            "name the layer that it was fitted on, with the pool that was used and an example_input of that size"
        )
