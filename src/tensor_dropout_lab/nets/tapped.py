"""A network that gives its last feature map instead of its outputs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor, nn

Layout = Literal["channels-first", "channels-last", "flat"]


@dataclass(frozen=True)
class Place:
    """Where a network's last feature map is.

    Attributes:
        module: the name of the module that makes or takes it; "" is the network itself.
        side: whether it is that module's output or input.
        layout: "channels-first" (B, C, *space), "channels-last" (B, *space, C), or "flat": (B, C · positions), also
            with one position.
        feature_shape: (C, *space), as a head takes it.
        left_out: the modules with parameters that do nothing for it, such as the published head.
        removed: whether those are removed; else the network does not run without them, and they stay, untrained.
        deterministic: whether nothing before it is random in ``eval`` mode.
    """

    module: str
    side: Literal["output", "input"]
    layout: Layout
    feature_shape: tuple[int, ...]
    left_out: tuple[str, ...] = ()
    removed: bool = True
    deterministic: bool = True

    def as_json(self) -> dict[str, Any]:
        """As JSON types."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, settings: dict[str, Any]) -> Place:
        """From what ``as_json`` gave."""
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()}
        return cls(**values)


class TappedBackbone(nn.Module):
    """A network up to its last feature map.

    The network runs whole, without the parameters behind the map, and a hook keeps the map.

    Args:
        network: the plain network; its modules behind the map are replaced by the identity, in place.
        place: where the map is.
    """

    prefix = "network."

    def __init__(self, network: nn.Module, place: Place) -> None:
        super().__init__()
        self.network, self.place = network, place
        self.feature_shape = place.feature_shape
        self.left_out = place.left_out
        self.deterministic_features = place.deterministic
        self._map: Tensor | None = None
        for name in place.left_out:
            if place.removed:
                network.set_submodule(name, nn.Identity())
            else:
                network.get_submodule(name).requires_grad_(False)
        tapped = network.get_submodule(place.module)
        if place.side == "input":
            tapped.register_forward_pre_hook(self._keep_input)
        elif place.module:
            tapped.register_forward_hook(self._keep_output)

    def _keep_input(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._map = inputs[0]

    def _keep_output(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        self._map = output

    def forward(self, x: Tensor) -> Tensor:
        """(B, *input_shape) -> (B, *feature_shape)."""
        output = self.network(x)
        features, self._map = output if self._map is None else self._map, None
        if self.place.layout == "channels-last":
            return features.movedim(-1, 1)
        return features.reshape(len(features), *self.feature_shape) if self.place.layout == "flat" else features

    def extra_repr(self) -> str:
        """Where the map is."""
        return f"{self.place.side} of {self.place.module or 'the network'}, feature_shape={self.feature_shape}"
