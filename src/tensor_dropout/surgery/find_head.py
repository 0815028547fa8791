"""Finding the head of a network by running it once.

Hooks on the linear layers, 1×1 convolutions and parameter-free modules, and a ``TorchFunctionMode`` for what
``forward`` computes by functions, note every map and every average. Autograd's graph then says what feeds a linear
layer: a map or an average, if nothing but reshapes lies between; else plain features, which is always right. And it
says what its output flows into: a squeeze-and-excitation gate flows back into convolutions, a head does not.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tensor_dropout.errors import TensorDropoutError

Kind = Literal["pool", "flatten", "features", "conv-pool"]
"""What feeds a linear layer: an averaged map, a flattened one, features; or a 1×1 convolution that is averaged."""

KINDS: tuple[str, ...] = get_args(Kind)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_POOLING_FUNCTIONS = {"mean", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"}
_POOLING_FUNCTIONS |= {"avg_pool1d", "avg_pool2d", "avg_pool3d"}
_DROPOUT_FUNCTIONS = {"dropout", "alpha_dropout"}
"""Those that drop single entries; the others drop whole channels."""
_REMEMBERED = 256  # how many of the latest maps are kept to be recognized
_RESHAPES = {"View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Clone", "Alias", "ToCopy", "Detach"}
"""Autograd nodes that leave every number as it is, in its order."""


@dataclass
class Pooling:
    """An average over all positions of a map, seen while the network ran; ``module`` is None for a function."""

    module: nn.Module | None
    map: Tensor
    map_node: Any
    output: Tensor
    output_node: Any
    call: Any
    """From a map to what was computed of it."""

    def is_average(self) -> bool:
        """Whether it averages any map, tried on a random one: an example may be constant."""
        generator = torch.Generator().manual_seed(0)
        drawn = torch.rand(self.map.shape, generator=generator, dtype=torch.float64)
        x = drawn.to(self.map.device, self.map.dtype)
        try:
            with torch.no_grad():
                found = self.call(x)
        except Exception:  # whatever it is, it is no average
            return False
        return isinstance(found, Tensor) and _is_mean(x, found)


@dataclass
class Seen:
    """One linear layer (or 1×1 convolution) that ran, and what fed it."""

    name: str
    module: nn.Module
    input_shape: tuple[int, ...]
    """The shape of its input, batch included."""
    calls: int = 1
    kind: Kind = "features"
    features: tuple[int, ...] = ()
    """The shape that a tensor regression in its place gets."""
    pooling: nn.Module | None = None
    """The module that averages the map, if a module does."""
    pooled_axes: int = 0
    """How many axes of size 1 it leaves."""
    dropouts: tuple[str, ...] = ()
    """What drops single entries, in training, between the averaging and the layer."""
    note: str = ""
    output: Tensor | None = None
    source: Any = None
    """The autograd node of its output."""
    trained: bool = True
    """Whether gradients were on when it ran."""

    @property
    def is_averaged(self) -> bool:
        """Whether the regression in its place takes a map of which the layer saw the average."""
        return self.kind in ("pool", "conv-pool")

    def describe(self) -> str:
        """A line for messages: name, type, sizes and what feeds it."""
        fed = {"pool": "an averaged map", "flatten": "a flattened map", "features": "features"}.get(self.kind, "a map")
        shape = "×".join(map(str, self.features or self.input_shape[1:]))
        return f"{self.name!r} ({describe_module(self.module)}, fed by {fed} {shape})"


@dataclass
class Trace:
    """What one run of the network showed."""

    output: list[Tensor]
    """The tensors that it returned."""
    seen: list[Seen]
    other: list[str]
    """The modules that ran last, for the message when there is no linear layer."""
    consumers: list[Any] = field(default_factory=list)
    """The autograd nodes of all maps that entered a convolution or an average."""


def describe_module(module: nn.Module) -> str:
    """Type and sizes: ``Linear(512 -> 1000)``."""
    sizes = (getattr(module, a, None) or getattr(module, b, None) for a, b in _SIZES)
    return f"{type(module).__name__}({' -> '.join(str(size) for size in sizes)})"


_SIZES = (("in_features", "in_channels"), ("out_features", "out_channels"))


def is_pointwise(module: nn.Module) -> bool:
    """Whether a module is a 1×1(×1) convolution that mixes all channels."""
    return (
        isinstance(module, CONVOLUTIONS)
        and set(module.kernel_size) == {1}
        and set(module.stride) == {1}
        and module.groups == 1
        and (module.padding == "same" or module.padding == "valid" or not any(int(p) for p in module.padding))
    )


def is_linear_like(module: nn.Module) -> bool:
    """Whether a module is a linear layer, also one of a kind that cannot be converted (quantized, for instance)."""
    if isinstance(module, nn.Linear) or is_pointwise(module):
        return True
    leaf = next(module.children(), None) is None or hasattr(module, "_packed_params")
    return leaf and type(module).__name__.endswith("Linear")


def run(model: nn.Module, example: Any, where: str = "tensorize_") -> list[Tensor]:
    """The tensors that the model returns for the example: a tensor, a tuple of arguments or a dict of them.

    Args:
        model: any network.
        example: its input.
        where: the caller's name, for the message.

    Raises:
        TensorDropoutError: if the model does not run on it, with the model's own words.
    """
    try:
        if isinstance(example, dict):
            output = model(**example)
        elif isinstance(example, tuple):
            output = model(*example)
        else:
            output = model(example)
    except TensorDropoutError:
        raise
    except Exception as error:  # the model is the user's: whatever it raises is passed on in our sentence
        words = str(error).strip().splitlines()
        shapes = [tuple(leaf.shape) for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)]
        raise TensorDropoutError(
            f"{where}: {type(model).__name__} does not run on example_input of shape {shapes}: "
            f"{type(error).__name__}: {words[0] if words else ''}; pass an input such as the model gets in use"
        ) from error
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


@contextmanager
def at_rest(model: nn.Module, devices: list[torch.device]) -> Iterator[None]:
    """``eval()`` inside; modes, buffers and random generators are put back, whatever happens."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    cuda = [device for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(devices=cuda):
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            with torch.no_grad():
                for module, name, buffer, before in buffers:
                    module._buffers[name] = buffer
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)


def trace(model: nn.Module, example: Any) -> Trace:
    """Run the model once, in the mode that it is in, and note what feeds its linear layers."""
    watcher = _Watcher(model)
    with torch.enable_grad():
        example = pytree.tree_map_only(Tensor, _begin_graph, example)
        watcher.maps.extend(leaf for leaf in pytree.tree_leaves(example) if _is_map(leaf))
        with watcher.watching():
            output = run(model, example)
    seen = list(watcher.seen.values())
    for pooling in watcher.poolings:
        _recognize_averaged_convolution(seen, pooling, watcher.dropouts)
    for each in seen:
        each.calls = watcher.runs[each.module]
        if each.kind == "pool" and each.pooling is not None and watcher.runs[each.pooling] > 1:
            average_first(each, f"its pooling is used {watcher.runs[each.pooling]} times in one forward pass")
    return Trace(output, seen, list(watcher.last), watcher.consumers)


def _begin_graph(tensor: Tensor) -> Tensor:
    """The same numbers at the beginning of a graph; not a leaf, so that they may be changed in place."""
    if not tensor.is_floating_point():
        return tensor
    with torch.enable_grad():
        return tensor.detach().clone().requires_grad_().clone()  # the first copy may leave inference mode


def _is_map(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim >= 3


def average_first(seen: Seen, reason: str) -> None:
    """Let the averaging in front of a layer stay: the regression is over the averaged features then."""
    seen.kind, seen.features, seen.pooling, seen.dropouts = "features", (seen.features[0],), None, ()
    seen.note = f"{reason}: it stays, and the regression is over the averaged features"


def choose_heads(trace: Trace) -> list[Seen]:
    """The linear layers from which the output follows without another map: the candidates for the head.

    Behind a map: those whose output reaches no convolution and no averaging. Beside them, or if there are none, the
    last linear layers on every path.
    """
    rows = [seen for seen in trace.seen if len(seen.input_shape) == 2 or seen.kind != "features" or _is_flat(seen)]
    rows = [seen for seen in rows if seen.trained] or rows  # what runs under no_grad is no head to be trained
    # A gate inside the network is no head, whatever feeds it: its output flows on into maps.
    ends = [seen for seen in rows if not _reaches(seen, trace.consumers)]
    fed_by_maps = _last_of([seen for seen in ends if seen.kind != "features"])
    # A convolution that is averaged and then goes through another linear layer is a part of the backbone.
    sources = [seen.source for seen in rows]
    fed_by_maps = [seen for seen in fed_by_maps if seen.kind != "conv-pool" or not _reaches(seen, sources)]
    others = _last_of([seen for seen in ends if seen.kind == "features"])
    return fed_by_maps + [seen for seen in others if not any(_reaches(head, [seen.source]) for head in fed_by_maps)]


def _last_of(candidates: list[Seen]) -> list[Seen]:
    """Those that flow into no other one of them."""
    return [each for each in candidates if not _reaches(each, [other.source for other in candidates])]


def _is_flat(seen: Seen) -> bool:
    return is_pointwise(seen.module) and prod(seen.input_shape[2:]) == 1


def _node(tensor: Tensor | None) -> Any:
    if tensor is None or not tensor.requires_grad:
        return None
    return torch.autograd.graph.get_gradient_edge(tensor).node


def _reaches(seen: Seen, targets: list[Any]) -> bool:
    """Whether the output of a layer is an ancestor of one of these autograd nodes."""
    if seen.source is None:
        return False
    waiting = [node for node in targets if node is not None and node is not seen.source]
    visited = set(waiting)
    while waiting:
        for parent, _ in waiting.pop().next_functions:
            if parent is seen.source:
                return True
            if parent is not None and parent not in visited:
                visited.add(parent)
                waiting.append(parent)
    return False


def _recognize_averaged_convolution(seen: list[Seen], pooling: Pooling, dropouts: list[tuple[str, Any]]) -> None:
    """A 1×1 convolution whose map is averaged is a linear layer on the averaged features: the two commute."""
    for each in seen:
        mapped = is_pointwise(each.module) and each.kind == "features" and prod(each.input_shape[2:]) > 1
        if mapped and _is_reshape(pooling.map_node, each.source):
            each.kind, each.features, each.pooling = "conv-pool", each.input_shape[1:], pooling.module
            each.pooled_axes = pooling.output.ndim - 2
            each.dropouts = _behind(each.source, dropouts)


def _behind(source: Any, dropouts: list[tuple[str, Any]]) -> tuple[str, ...]:
    """The dropouts whose input is what an autograd node computed."""
    return tuple(dict.fromkeys(name for name, node in dropouts if _is_reshape(node, source)))


def _is_reshape(node: Any, source: Any) -> bool:
    """Whether nothing but reshapes leads from the autograd node ``source`` to ``node``."""
    while node is not None and source is not None:
        if node is source:
            return True
        name = type(node).__name__.rstrip("0123456789").removesuffix("Backward")
        node = node.next_functions[0][0] if name in _RESHAPES and len(node.next_functions) == 1 else None
    return False


def _is_mean(x: Tensor, found: Tensor) -> bool:
    """Whether ``found`` is the mean of ``x`` over all positions, up to rounding."""
    if found.shape[:2] != x.shape[:2] or found.numel() != x.shape[0] * x.shape[1]:
        return False
    rough = {torch.float64: 1e-9, torch.float32: 1e-4}.get(x.dtype, 2e-2)
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    mean = x.to(wide).flatten(2).mean(2)
    scale = x.to(wide).abs().amax().clamp(min=1e-30)
    return bool(((found.flatten(1).to(wide) - mean).abs() <= rough * scale).all())


def _rate(x: Tensor, p: float = 0.5, *_: Any, **__: Any) -> float:
    """The rate of a call of ``F.dropout``."""
    return p


class _Watcher(TorchFunctionMode):
    """Notes maps, averages and linear layers while a model runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.seen: dict[nn.Module, Seen] = {}
        self.poolings: list[Pooling] = []
        self.maps: deque[Tensor] = deque(maxlen=_REMEMBERED)
        self.runs: Counter[nn.Module] = Counter()
        self.last: deque[str] = deque(maxlen=8)
        self.consumers: list[Any] = []
        self.dropouts: list[tuple[str, Any]] = []
        """The name of each dropout that ran, and the autograd node of its input."""
        self._running = ""  # the dropout module that runs now
        self._busy = False  # our own arithmetic is not noted
        self._grad_was_on = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__ in _DROPOUT_FUNCTIONS and args and isinstance(args[0], Tensor) and _rate(*args, **kwargs) > 0:
            self.dropouts.append((self._running or "a dropout function inside forward", _node(args[0])))
        output = func(*args, **kwargs)
        if not self._busy and isinstance(output, Tensor) and output.is_floating_point():
            if func.__name__ in _POOLING_FUNCTIONS and args and isinstance(args[0], Tensor):
                self._note_average(None, args[0], output, lambda x: func(x, *args[1:], **kwargs))
            if output.ndim >= 3:
                self.maps.append(output)
        return output

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks on every module without children, and this mode, inside."""
        hooks: list[Any] = []
        try:
            for name, module in self.model.named_modules():
                inner = next(module.children(), None) is not None and not is_linear_like(module)
                if inner or isinstance(module, torch.jit.ScriptModule):
                    continue
                hooks.append(module.register_forward_pre_hook(self._before(name, module), prepend=False))
                hooks.append(module.register_forward_hook(self._after(name, module), prepend=True))
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, name: str, module: nn.Module) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.last.append(f"{name} ({type(module).__name__})")
            self.runs[module] += 1
            self._running = repr(name) if isinstance(module, nn.modules.dropout._DropoutNd) else ""
            if not args or not isinstance(args[0], Tensor):
                return
            x = args[0]
            if isinstance(module, CONVOLUTIONS) and (prod(x.shape[2:]) > 1 or not is_pointwise(module)):
                self.consumers.append(_node(x))
            if is_linear_like(module):
                self._grad_was_on = torch.is_grad_enabled()
                with self._own():
                    self._note_linear(name, module, x)

        return note

    def _after(self, name: str, module: nn.Module) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            self._running = ""
            if not isinstance(output, Tensor) or not args or not isinstance(args[0], Tensor):
                return None
            if module in self.seen:
                with self._own():
                    # Where gradients are off there is no graph: it begins here.
                    output = output if output.requires_grad else _begin_graph(output)
                    self.seen[module].output, self.seen[module].source = output, _node(output)
                return output
            if output.ndim >= 3 and output.is_floating_point():
                self.maps.append(output)
            if not any(True for _ in module.parameters(recurse=False)):
                self._note_average(module, args[0], output, type(module).forward.__get__(module))
            return None

        return note

    @contextmanager
    def _own(self) -> Iterator[None]:
        before, self._busy = self._busy, True
        try:
            with torch.no_grad():
                yield
        finally:
            self._busy = before

    def _note_average(self, module: nn.Module | None, x: Tensor, output: Tensor, call: Any) -> None:
        """Note that ``output`` is the average of the map ``x`` over all its positions, if it is."""
        if not 3 <= x.ndim <= 5 or not x.is_floating_point() or prod(x.shape[2:]) == 1:
            return
        with self._own():
            if not _is_mean(x.detach(), output.detach()):
                return
            pooling = Pooling(module, x, _node(x), output, _node(output), call)
            if pooling.is_average():
                self.poolings.append(pooling)
                self.consumers.append(_node(x))

    def _note_linear(self, name: str, module: nn.Module, x: Tensor) -> None:
        if module in self.seen:
            return
        seen = self.seen[module] = Seen(name, module, tuple(x.shape), features=tuple(x.shape[1:]))
        seen.trained = self._grad_was_on
        flat = x.ndim == 2 or (is_pointwise(module) and prod(x.shape[2:]) == 1)
        if not flat or not x.is_floating_point():
            return
        seen.features, node = (x[0].numel(),), _node(x)
        for pooling in reversed(self.poolings):
            if _is_reshape(node, pooling.output_node):
                if pooling.module is None:
                    average_first(seen, f"the averaging of {tuple(pooling.map.shape[1:])} is a function inside forward")
                else:
                    seen.kind, seen.features, seen.pooling = "pool", tuple(pooling.map.shape[1:]), pooling.module
                    seen.pooled_axes = pooling.output.ndim - 2
                    seen.dropouts = _behind(pooling.output_node, self.dropouts)
                return
        for map_ in reversed(self.maps):
            spatial = map_.shape[0] == x.shape[0] and map_.numel() == x.numel() and prod(map_.shape[2:]) > 1
            if spatial and _is_reshape(node, _node(map_)):
                seen.kind, seen.features = "flatten", tuple(map_.shape[1:])
                return
