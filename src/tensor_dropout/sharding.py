"""Heads with millions of classes: the output factor and the bias split over processes, class by class.

``logits = h Vᵀ + b`` with ``h`` (B, R) the features contracted with everything but the output factor ``V`` (O, R).
Each process computes all of ``h`` (small) and the logits of its own classes. Only ``h`` is shared: in the backward
pass its gradient is summed over the processes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import broadcast
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.func import functional_call

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.dropout import Masks
from tensor_dropout.layers.formats import FORMATS
from tensor_dropout.layers.moments import ExactMoments
from tensor_dropout.layers.regression import TensorRegression


class OutputParallel(ParallelStyle):
    """Shards a tensor regression head over its classes, for ``parallelize_module``.

    The output factor (Tucker, CP: ``factors[-1]``; TT: ``cores[-1]``) and the bias become DTensors that are sharded
    over the classes; the other parameters become replicated DTensors. The head then returns logits (B, O) as a DTensor
    that is sharded over the classes: what ``loss_parallel`` takes. No process ever holds all logits.

    Masks belong to the rank axes, so they must be the same everywhere: every process draws from its own generator, as
    the plain layer does, and those of the mesh's first process count (one broadcast of the ranks per pass). Under
    ``input_layouts=Shard(0)`` masks per sample stay with their samples.

    Args:
        input_layouts: ``Replicate()``: every process passes the same features. ``Shard(0)``: every process passes its
            own samples, equally many (``drop_last=True`` in the loader); the processes then exchange ``h`` (B, R), not
            the features, and the logits are those of all samples, in the order of the processes.

    Raises:
        TensorDropoutError: on ``parallelize_module``, if the module is no plain tensor regression layer with one output
            mode, the mesh is not 1-D, or a process would get no class.

    Example: on every process, with the same features and labels on each.

        >>> import torch, tensor_dropout as td
        >>> from torch import nn
        >>> from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
        >>> from tensor_dropout.sharding import OutputParallel
        >>> def train_one_step(mesh, images, labels):
        ...     torch.manual_seed(0)  # the same backbone on every process; the head is that of the first
        ...     head = td.TuckerRegression((64, 7, 7), 1000, rank=(32, 3, 3, 32), dropout=0.8)
        ...     model = nn.Sequential(nn.Conv2d(3, 64, 3, stride=4), nn.AdaptiveAvgPool2d(7), head)
        ...     parallelize_module(model, mesh, {"2": OutputParallel()})
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     logits = model(images)  # (B, 1000), sharded over the classes
        ...     with loss_parallel():
        ...         loss = nn.functional.cross_entropy(logits, labels)
        ...         loss.backward()
        ...     optimizer.step()
        ...     return loss.to_local()
    """

    def __init__(self, *, input_layouts: Placement | None = None) -> None:
        super().__init__()
        self.input_layouts = Replicate() if input_layouts is None else input_layouts
        if self.input_layouts not in (Replicate(), Shard(0)):
            raise TensorDropoutError(
                f"OutputParallel: input_layouts is Replicate() or Shard(0), the batch, got {input_layouts}"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        kind = _check(module, device_mesh)
        assert isinstance(module, TensorRegression)
        trunk = _Trunk(module)
        output, dim = _output_parameter(module)
        for name, parameter in list(module.named_parameters()):
            placement = Shard(dim) if name == output else Shard(0) if name == "bias" else Replicate()
            part = distribute_tensor(parameter.detach(), device_mesh, [placement], src_data_rank=self.src_data_rank)
            owner, _, last = name.rpartition(".")
            sharded = nn.Parameter(part, requires_grad=parameter.requires_grad)
            module.get_submodule(owner).register_parameter(last, sharded)
        if module.center is not None:  # as the parameters: that of the first process
            center = distribute_tensor(module.center, device_mesh, [Replicate()], src_data_rank=self.src_data_rank)
            module.center = center.to_local()
        module.__class__ = kind  # in place, as fully_shard does: the model keeps its head
        assert isinstance(module, ShardedRegression)
        module._mesh, module._layout = device_mesh, self.input_layouts
        module._trunk = (trunk,)
        return module

    def __repr__(self) -> str:
        return f"OutputParallel(input_layouts={self.input_layouts})"


class ShardedRegression(TensorRegression):
    """What :class:`OutputParallel` makes of a layer; not made directly.

    ``h`` comes from a layer of the same kind whose output factor is the identity (R, R), on local tensors.
    """

    _mesh: DeviceMesh
    _layout: Placement
    _trunk: tuple[_Trunk]  # in a tuple, so that it is no submodule: its parameters are this layer's

    def forward(self, x: Tensor) -> Any:
        """``⟨x, W̃⟩ + b``: (B, *input_shape) -> (B, O), a DTensor that is sharded over the classes."""
        if self._instead_of_forward is not None:
            raise TensorDropoutError(_LOGITS_ONLY)
        if isinstance(x, DTensor):
            x = x.redistribute(placements=[self._layout]).to_local()
        return super().forward(x)

    def regress(self, x: Tensor, masks: Masks) -> Tensor:
        """``⟨x, W̃⟩ + b`` under the masks of the mesh's first process."""
        parameters = {name: each for name, each in self.named_parameters() if isinstance(each, DTensor)}
        name, dim = _output_parameter(self)
        output = parameters.pop(name)
        bias = parameters.pop("bias", None)
        # With all samples a process knows these gradients whole; with its own samples, its part of the sum.
        gradient = Replicate() if self._layout == Replicate() else Partial()
        operands = {  # the backward of redistribute sums the parts
            name: each.redistribute(placements=[Replicate()]).to_local(grad_placements=[gradient])
            for name, each in parameters.items()
        }
        h = self._trunk[0].project(self._centered(x), self._common(masks), operands)  # (B, R)
        # All samples on every process; what comes back is the part of the gradient due to a process's own classes.
        gathered = DTensor.from_local(h, self._mesh, [self._layout], run_check=False)
        h = gathered.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        V = output.to_local().movedim(dim, 0).flatten(1)  # (O / processes, R)
        logits = nn.functional.linear(h, V)
        logits = logits if bias is None else logits + bias.to_local().to(logits.dtype)
        shape = torch.Size((h.shape[0], *self.output_shape))
        stride = (self.output_shape[0], 1)
        return DTensor.from_local(logits, self._mesh, [Shard(1)], run_check=False, shape=shape, stride=stride)

    def exact_moments(self, x: Tensor, *, covariance: bool = False) -> ExactMoments:
        """Refused: moments need all classes at once."""
        raise TensorDropoutError(_LOGITS_ONLY)

    def config(self) -> dict[str, Any]:
        """Refused: files hold plain layers."""
        raise TensorDropoutError(
            "OutputParallel: a sharded head cannot be saved as it is; load its full tensors (full_tensor, or torch's "
            "get_model_state_dict with full_state_dict=True) into a plain head"
        )

    def _common(self, masks: Masks) -> Masks:
        """The masks of the mesh's first process; those of a process's own samples stay."""
        shared = [k for k, c in enumerate(masks) if c is not None and (c.ndim == 1 or self._layout == Replicate())]
        if not shared:
            return masks
        drawn = [mask for k in shared if (mask := masks[k]) is not None]
        flat = torch.cat([mask.flatten() for mask in drawn])
        broadcast(flat, group=self._mesh.get_group(), group_src=0)
        common = list(masks)
        for k, mask, part in zip(shared, drawn, flat.split([mask.numel() for mask in drawn]), strict=True):
            common[k] = part.view_as(mask)
        return common


@cache
def sharded_class(plain: type[TensorRegression]) -> type[ShardedRegression]:
    """The sharded kind of a layer's class, as ``fully_shard`` makes one."""
    name = f"Sharded{plain.__name__}"
    return type(name, (ShardedRegression, plain), {"__doc__": f"A {plain.__name__} sharded over its classes."})


_LOGITS_ONLY = "OutputParallel: a sharded head gives logits only, not moments; use F.cross_entropy under loss_parallel"


class _Trunk(nn.Module):
    """A layer up to its output factor: one of the same kind and ranks with R outputs, run on given tensors."""

    def __init__(self, layer: TensorRegression) -> None:
        super().__init__()
        self.output, _ = _output_parameter(layer)
        self.rank = layer._ranks[-1]
        dtype = next(layer.parameters()).dtype
        self.layer = type(layer)(layer.input_shape, self.rank, layer._ranks, bias=False, device="meta", dtype=dtype)

    def forward(self, x: Tensor, masks: Masks) -> Tensor:
        """What ``functional_call`` calls."""
        return self.layer.regress(x, masks)

    def project(self, x: Tensor, masks: Masks, operands: dict[str, Tensor]) -> Tensor:
        """``h`` (B, R), from all parameters but the output factor, which is replaced by the identity."""
        like = next(iter(operands.values()))
        identity = torch.eye(self.rank, dtype=like.dtype, device=like.device)
        tensors = {**operands, self.output: identity.view(self.layer.get_parameter(self.output).shape)}
        named = {f"layer.{name}": tensor for name, tensor in tensors.items()}
        h: Tensor = functional_call(self, named, (x, masks))
        return h


def _check(module: nn.Module, mesh: DeviceMesh) -> type[ShardedRegression]:
    """What the module becomes; raises if it cannot be sharded over this mesh."""
    plain = any(format.layer is type(module) for format in FORMATS.values())
    if not plain or any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise TensorDropoutError(
            f"OutputParallel: expected a plain tensor regression layer, got {type(module).__name__}; name the head in "
            "the plan, as in {'head': OutputParallel()}, and shard it once"
        )
    assert isinstance(module, TensorRegression)
    _output_parameter(module)
    if len(module.output_shape) != 1:
        raise TensorDropoutError(
            f"OutputParallel: the head must have one output mode, got output_shape={module.output_shape}; use one mode "
            "of all classes"
        )
    if mesh.ndim != 1:
        raise TensorDropoutError(
            f"OutputParallel: the mesh must have one dimension, got {mesh.ndim}; pass one, as in mesh['classes']"
        )
    classes, processes = module.output_shape[0], mesh.size()
    shard = -(-classes // processes)  # all shards but the last have this size
    if shard * (processes - 1) >= classes:
        raise TensorDropoutError(
            f"OutputParallel: {classes} classes in shards of {shard} do not reach all {processes} processes; use a "
            "smaller mesh"
        )
    return sharded_class(type(module))


def _output_parameter(layer: TensorRegression) -> tuple[str, int]:
    """The name of the output factor, and which of its axes are the classes."""
    output = layer.output_parameter
    if output is None:
        raise TensorDropoutError(
            f"OutputParallel: a {type(layer).__name__} cannot be sharded over its classes, since its output factor has "
            "more than one rank axis; use a Tucker, CP or TT head"
        )
    return output
