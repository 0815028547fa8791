"""What surgery refuses, by name, before it changes anything."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.surgery.find_head import CONVOLUTIONS, Seen

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def check_model(model: Any, where: str) -> None:
    """Refuse what is not a plain module, with the way out.

    Raises:
        TensorDropoutError: for DDP, DataParallel, FSDP, compiled and scripted models, and those that never ran.
    """
    if not isinstance(model, nn.Module):
        raise TensorDropoutError(f"{where}: expected an nn.Module, got {type(model).__name__}")
    if isinstance(model, DataParallel | DistributedDataParallel):
        raise TensorDropoutError(
            f"{where}: the model is wrapped in {type(model).__name__}; convert model.module first, then wrap it again"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise TensorDropoutError(f"{where}: the model is TorchScript; convert the original module")
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise TensorDropoutError(f"{where}: the model is compiled; convert model._orig_mod first, then compile again")
    sharded = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    if sharded or any(hasattr(parameter, "placements") for parameter in model.parameters()):
        raise TensorDropoutError(
            f"{where}: the model is sharded (FSDP); convert it before fully_shard, on every process, then shard it"
        )
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise TensorDropoutError(f"{where}: the model has lazy layers that never ran; run it once first")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise TensorDropoutError(f"{where}: the model is on the meta device; load its weights first")


def check_example(model: nn.Module, example: Any) -> None:
    """Refuse an example without tensors, and one on which the model could not go on training as it stands."""
    tensors = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)]
    if not tensors:
        raise TensorDropoutError(
            f"tensorize_: example_input is a tensor, a tuple or a dict of them, got {type(example).__name__}"
        )
    batches = [tensor for tensor in tensors if tensor.ndim > 0]
    if not batches or any(tensor.shape[0] == 0 for tensor in batches):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise TensorDropoutError(f"tensorize_: example_input has no samples: {shapes}")
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if batches[0].shape[0] == 1 and any(norm.training for norm in norms):
        raise TensorDropoutError(
            "tensorize_: the model is in training mode and has batch normalisation, which cannot be run on one sample; "
            "call model.eval() first, or pass an example_input of at least 2 samples"
        )


def check_layer(model: nn.Module, seen: Seen) -> None:
    """Refuse a layer whose replacement would drop something silently.

    Raises:
        TensorDropoutError: naming the layer and the reason.
    """
    where = f"tensorize_: the layer {seen.name!r}"
    if seen.module is model or seen.pooling is model:
        raise TensorDropoutError(
            "tensorize_: the model is the layer itself, which cannot replace itself in place; put it into nn.Sequential"
        )
    if seen.calls > 1:
        raise _refusal(seen, f"is used {seen.calls} times in one forward pass", "convert a copy for each use")
    if parametrize.is_parametrized(seen.module):
        raise _refusal(
            seen, "has a parametrization", "remove it with torch.nn.utils.parametrize.remove_parametrizations"
        )
    for module in (seen.module, seen.pooling):
        if module is not None:
            check_hooks(module, where)
    weight = getattr(seen.module, "weight", None)
    if not isinstance(weight, nn.Parameter) or not weight.is_floating_point() or type(weight.data) is not Tensor:
        raise _refusal(
            seen,
            f"is quantized or has no plain weight ({type(seen.module).__name__})",
            "convert the network first, then quantize it",
        )
    plain = (nn.Linear.forward, *(convolution.forward for convolution in CONVOLUTIONS))
    if type(seen.module).forward not in plain:
        raise _refusal(seen, f"is a {type(seen.module).__name__} with a forward of its own", "use a plain nn.Linear")
    if not weight.requires_grad:
        raise _refusal(seen, "is frozen (requires_grad=False)", "call requires_grad_(True) on it")
    if len(seen.input_shape) != 2 and seen.kind == "features" and not _on_one_position(seen):
        raise _refusal(seen, f"gets inputs of shape {seen.input_shape}: one output for each position", "name another")
    check_tied(model, seen.module, where)


def _on_one_position(seen: Seen) -> bool:
    return isinstance(seen.module, CONVOLUTIONS) and all(size == 1 for size in seen.input_shape[2:])


def check_hooks(module: nn.Module, where: str) -> None:
    """Refuse a module with hooks, on it, inside it or on its parameters: they would go with it, silently."""
    for part in module.modules():
        held = [hook for hook in _HOOKS if getattr(part, hook, None)]
        on_parameters = any(
            parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
            for parameter in part.parameters(recurse=False)
        )
        if held or on_parameters:
            what = "hooks on its parameters" if on_parameters else f"hooks ({held[0].strip('_')})"
            raise TensorDropoutError(
                f"{where} has {what} on {type(part).__name__}; remove them, do this, and register them anew"
            )


def check_tied(model: nn.Module, module: nn.Module, where: str) -> None:
    """Refuse a module that shares parameters with others: the others would keep the old ones."""
    own = set(module.parameters())
    inside = set(module.modules())
    for name, other in model.named_modules():
        if other not in inside and own & set(other._parameters.values()):
            raise TensorDropoutError(f"{where} shares its parameters with {name!r}; untie them (clone the parameter)")


def _refusal(seen: Seen, reason: str, advice: str) -> TensorDropoutError:
    return TensorDropoutError(f"tensorize_: the layer {seen.name!r} {reason}; {advice}, or pick another with heads=")
