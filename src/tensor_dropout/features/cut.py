"""A network up to some of its layers: cut with torch.fx where its ``forward`` can be traced, else ended by a hook."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.layers import Enough, Place, outputs_at


class HookedBackbone(nn.Module):
    """The whole network, whose forward pass a hook ends behind the last layer that is wanted.

    Args:
        network: any network.
        places: the layers whose outputs are returned.
    """

    def __init__(self, network: nn.Module, places: Sequence[Place]) -> None:
        super().__init__()
        self.network, self.places = network, tuple(places)

    def forward(self, x: Tensor) -> list[Tensor]:
        """The outputs of the layers.

        Raises:
            TensorDropoutError: while it is exported.
        """
        if torch.compiler.is_exporting():
            raise TensorDropoutError(
                f"export: {type(self.network).__name__} cannot be exported up to {self.places[-1].name!r}: torch.fx "
                "cannot trace its forward, so that a hook ends it there; a forward that does not branch on tensors, "
                "their shapes or self.training can be cut, as those of nn.Sequential and of torchvision's ResNet"
            )
        return outputs_at(self.network, self.places, x)


class _Whole(nn.Module):
    """A network under the name ``network``, called with one argument: others keep their defaults."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x):  # type: ignore[no-untyped-def]  # torch.fx cannot pickle a postponed annotation
        return self.network(x)


class _Tracer(fx.Tracer):
    """Traces the modules around the layers, up to the last layer; all other modules stay whole.

    Args:
        network: the network.
        places: the layers.
    """

    proxy_buffer_attributes = True

    def __init__(self, network: nn.Module | None = None, places: Sequence[Place] = ()) -> None:
        super().__init__()  # without arguments: how torch unpickles a cut network
        self.layers = [] if network is None else [network.get_submodule(place.name) for place in places]
        self.around = [] if network is None else _around(network, places)
        self.places = places
        self.calls = [0] * len(places)
        self.outputs: dict[int, fx.Proxy] = {}
        self.context = _context()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not isinstance(m, _Whole) and m not in self.around

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _context() != self.context:
            raise TensorDropoutError("inside no_grad, autocast or the like, which a trace would lose")
        return super().create_node(*args, **kwargs)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        output = super().call_module(m, forward, args, kwargs)
        for number, (layer, place) in enumerate(zip(self.layers, self.places, strict=True)):
            if layer is m:
                self.calls[number] += 1
                if self.calls[number] == place.calls:
                    self.keep(number, output if place.key is None else output[place.key])
        return output

    def keep(self, number: int, output: fx.Proxy) -> None:
        self.outputs[number] = output
        if len(self.outputs) == len(self.places):
            raise Enough
        self.outputs[number] = output.clone()  # an in-place operation may follow


def cut(network: nn.Module, places: Sequence[Place]) -> fx.GraphModule:
    """The network up to these layers, with the same parameters and without what comes behind them.

    Only the modules around the layers are traced; all others stay whole, with their hooks, ``train`` and ``eval``.

    Raises:
        Exception: whatever torch.fx meets in a ``forward`` that it cannot trace.
        TensorDropoutError: if the cut network would compute something else in ``train`` mode or in ``backward``.
    """
    with _modes_kept(_around(network, places)) as around, torch.enable_grad():
        cuts = []
        for training in (True, False):
            for module in around:
                module.training = training
            cuts.append(_trace(network, places))
    if cuts[0].code != cuts[1].code:
        raise TensorDropoutError("its forward asks for self.training, which a trace would lose")
    return cuts[1]


def _trace(network: nn.Module, places: Sequence[Place]) -> fx.GraphModule:
    whole, tracer = _Whole(network), _Tracer(network, places)
    try:
        tracer.trace(whole)
    except Enough:
        outputs = [tracer.outputs[number].node for number in range(len(places))]
        tracer.graph.output(outputs)
        return fx.GraphModule(whole, tracer.graph, f"{type(network).__name__}UpTo")
    raise TensorDropoutError("the layers did not all run while the network was traced")


def _around(network: nn.Module, places: Sequence[Place]) -> list[nn.Module]:
    """The modules that contain one of the layers."""
    return [
        module
        for name, module in network.named_modules(remove_duplicate=False)
        if any(place.name != name and (name == "" or place.name.startswith(f"{name}.")) for place in places)
    ]


@contextmanager
def _modes_kept(modules: list[nn.Module]) -> Iterator[list[nn.Module]]:
    modes = [module.training for module in modules]
    try:
        yield modules
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


def _context() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), *(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))


def cut_or_hook(network: nn.Module, places: Sequence[Place], example: Tensor) -> nn.Module:
    """The network cut at its layers; where that fails or gives other numbers for the example, with a hook."""
    try:
        backbone = cut(network, places)
        return backbone if _agree(backbone, network, places, example) else HookedBackbone(network, places)
    except Exception:  # whatever torch.fx meets in the user's forward
        return HookedBackbone(network, places)


@torch.no_grad()
def _agree(backbone: nn.Module, network: nn.Module, places: Sequence[Place], example: Tensor) -> bool:
    """Whether both give the same, also for another number of samples."""
    for x in (example, torch.cat([example, example[:1]])):
        for a, b in zip(backbone(x), outputs_at(network, places, x), strict=True):
            if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True):
                return False
    return True
