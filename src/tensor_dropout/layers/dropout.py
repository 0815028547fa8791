"""Tensor dropout: draws the random diagonals of a layer's rank axes, scaled as asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.laws import ExchangeableLaw, Law, law_name, resolve_law

Modes = Literal["all", "outer", "auto"] | Sequence[int]
Masks = list[Tensor | None]
"""One entry per rank axis: None (not masked), ``(R,)`` for the whole batch, or ``(B, R)`` for each sample."""


class TensorDropout(nn.Module):
    """Randomizes the rank of a tensor regression layer.

    On each dropped rank axis the weight is multiplied by a random diagonal ``c`` (paper, section "Tensor
    dropout"): ``G̃ = G ×_0 diag(c_0) … ×_N diag(c_N)`` for Tucker, ``W̃ = Σ_r c_r u0_r ∘ … ∘ uN_r`` for CP, and a
    diagonal on the bonds for TT. It lives inside the layer, so ``train()``, ``eval()``, ``repr`` and checkpoints
    all see it.

    Args:
        theta: the KEEP probability θ in (0, 1]. Assign to ``dropout.theta`` to change it; nothing recompiles.
        law: "bernoulli", "replacement", "gaussian", "nested", a name given to ``td.register_law``, or an object
            that implements :class:`td.Law`.
        modes: which modes are dropped: "all" (those of rank above 1; the paper's), "outer" (the first and the last of
            them all, if of rank above 1: channels and outputs where x is (B, C, *space) and there is one output mode,
            not the few spatial ranks), "auto" (the largest rank of the inputs alone: of feature maps that of the
            channels), or a sequence of axes of ``layer.dense_weight()``; for TT, bond numbers 1..N. CP has one mask for
            all modes.
        per_sample: draw one mask for each sample instead of one for the whole batch (the paper's).
        scaling: "inverted" multiplies by ``c / E[c]``, so that the mean weight is W and test time changes nothing;
            "paper" multiplies by ``c`` in training and by ``E[c]`` at test time.
        min_rank: at least this many ranks survive every draw: Bernoulli is conditioned on it, nested draws its cut from
            {min_rank..R}; the other laws refuse it.
        at_test: "mean" uses the mean weight in ``eval()``; "sample" goes on drawing masks.

    Raises:
        TensorDropoutError: if an argument is outside its range.

    Example:
        >>> import torch, tensor_dropout as td
        >>> _ = torch.manual_seed(0)  # two draws may be alike by chance
        >>> layer = td.TuckerRegression((8, 4, 4), 10, rank=(4, 2, 2, 5), dropout=td.TensorDropout(0.8))
        >>> x = torch.randn(2, 8, 4, 4)
        >>> bool((layer(x) == layer(x)).all()), bool((layer.eval()(x) == layer(x)).all())
        (False, True)
        >>> layer.dropout.theta = 0.9
        >>> layer.dropout
        TensorDropout(theta=0.9, law='bernoulli', modes='all', scaling='inverted')
    """

    theta: Tensor
    """θ as a float32 0-d buffer; ``.half()`` and ``.double()`` of the network do not cast it."""

    def __init__(
        self,
        theta: float,
        *,
        law: str | Law = "bernoulli",
        modes: Modes = "all",
        per_sample: bool = False,
        scaling: Literal["inverted", "paper"] = "inverted",
        min_rank: int = 0,
        at_test: Literal["mean", "sample"] = "mean",
    ) -> None:
        super().__init__()
        _check_choice("scaling", scaling, ("inverted", "paper"))
        _check_choice("at_test", at_test, ("mean", "sample"))
        if isinstance(min_rank, bool) or not isinstance(min_rank, int) or min_rank < 0:
            raise TensorDropoutError(f"TensorDropout: min_rank is an integer of at least 0, got {min_rank!r}")
        # Always made on the CPU, so that a layer built on the meta device keeps its θ.
        self.register_buffer("theta", torch.tensor(check_theta(theta), dtype=torch.float32, device="cpu"))
        self.law = resolve_law(law, min_rank)
        self._law_name = law_name(self.law)  # kept, since a copy of a registered law is another object
        self.modes = _check_modes(modes)
        self.per_sample = bool(per_sample)
        self.scaling = scaling
        self.min_rank = getattr(self.law, "min_rank", min_rank)
        self.at_test = at_test

    @property
    def is_random(self) -> bool:
        """Whether the next forward draws masks (training, or ``at_test="sample"``)."""
        return self.training or self.at_test == "sample"

    def dropped_axes(
        self, ranks: Sequence[int], mode_numbers: Sequence[int], largest_input: int = 0
    ) -> tuple[int, ...]:
        """Positions in ``ranks`` of the axes that are dropped.

        Args:
            ranks: the sizes of the layer's rank axes.
            mode_numbers: what the user calls each of them; empty if the layer has a single shared rank (CP).
            largest_input: the position of the largest rank of the inputs: what "auto" drops.

        Raises:
            TensorDropoutError: if ``modes`` names an axis that the layer lacks, or ``min_rank`` exceeds a rank.
        """
        if isinstance(self.modes, str):
            named: Sequence[int] = {"outer": (0, len(ranks) - 1), "auto": (largest_input,)}.get(
                self.modes, range(len(ranks))
            )
            axes = tuple(k for k, rank in enumerate(ranks) if rank > 1 and k in named)
        elif not mode_numbers:
            raise TensorDropoutError(
                f"TensorDropout: a CP layer has one mask for all modes, got modes={self.modes}; use modes='all'"
            )
        elif unknown := [mode for mode in self.modes if mode not in mode_numbers]:
            raise TensorDropoutError(
                f"TensorDropout: modes={self.modes} names {unknown}, but the layer has {list(mode_numbers)}"
            )
        else:
            axes = tuple(k for k, mode in enumerate(mode_numbers) if mode in self.modes)
        for k in axes:
            if ranks[k] < self.min_rank:
                raise TensorDropoutError(
                    f"TensorDropout: min_rank={self.min_rank} exceeds the rank {ranks[k]} of a dropped mode "
                    f"(ranks {tuple(ranks)}); lower min_rank or leave that mode out of modes"
                )
        return axes

    def forward(self, ranks: Sequence[int], axes: Sequence[int], batch: int, like: Tensor) -> Masks:
        """The masks for one forward pass of a layer.

        Args:
            ranks: the sizes of the layer's rank axes.
            axes: the dropped ones, from :meth:`dropped_axes`.
            batch: the number of samples; used by ``per_sample`` masks.
            like: a tensor on the device and in the dtype of the layer.

        Returns:
            One entry per rank axis: None where nothing is multiplied.
        """
        if self.is_random:
            return self.draw(ranks, axes, batch if self.per_sample else None, like)
        if self.scaling == "paper":
            return self.means(ranks, axes, like)
        return [None] * len(ranks)

    def means(self, ranks: Sequence[int], axes: Sequence[int], like: Tensor) -> Masks:
        """``E[c]``, unscaled, on the dropped axes: what the paper's scaling multiplies by at test time."""
        return self._fill(ranks, axes, lambda R: self.law.mean(R, self.theta), like)

    def draw(self, ranks: Sequence[int], axes: Sequence[int], batch: int | None, like: Tensor) -> Masks:
        """Draw masks whatever the mode: ``(R,)`` each, or ``(batch, R)`` if ``batch`` is given."""

        def scaled(R: int) -> Tensor:
            shape = (R,) if batch is None else (batch, R)
            if isinstance(self.law, ExchangeableLaw) and self.scaling == "inverted" and like.dtype != torch.float64:
                return self.law.draw_inverted(shape, self.theta, device=like.device)
            return self.scale(self.law.draw(shape, self.theta, device=like.device))

        if not axes or not getattr(self.law, "independent", False):
            return self._fill(ranks, axes, scaled, like)
        sizes = [ranks[k] for k in axes]
        parts = iter(scaled(sum(sizes)).split(sizes, -1))  # all entries are alike: one draw for all axes
        return self._fill(ranks, axes, lambda R: next(parts), like)

    def scale(self, mask: Tensor) -> Tensor:
        """``c / E[c]`` for inverted scaling, ``c`` itself for the paper's; the rank axis is the last."""
        if self.scaling == "paper":
            return mask
        return mask / self.law.mean(mask.shape[-1], self.theta).to(mask.device)

    def _fill(self, ranks: Sequence[int], axes: Sequence[int], make: Any, like: Tensor) -> Masks:
        # Masks stay in float32 next to half-precision weights: 1/θ in bf16 would bias every kept rank.
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return [make(R).to(device=like.device, dtype=dtype) if k in axes else None for k, R in enumerate(ranks)]

    def config(self) -> dict[str, Any]:
        """The arguments that make an equal module, as JSON types; θ is the current one."""
        name = law_name(self.law) or self._law_name
        if name is None:
            raise TensorDropoutError(
                f"TensorDropout: the law {self.law!r} has no name to save; give it one with td.register_law"
            )
        return {
            "theta": float(str(np.float32(self.theta.item()))),  # the shortest number that is this float32
            "law": name,
            "modes": self.modes if isinstance(self.modes, str) else list(self.modes),
            "per_sample": self.per_sample,
            "scaling": self.scaling,
            "min_rank": self.min_rank,
            "at_test": self.at_test,
        }

    def extra_repr(self) -> str:
        """theta, law, modes and scaling always, the other arguments if they differ from their defaults."""
        name = law_name(self.law) or self._law_name or type(self.law).__name__
        shown = f"theta={float(self.theta):.6g}, law={name!r}, modes={self.modes!r}, scaling={self.scaling!r}"
        shown += ", per_sample=True" if self.per_sample else ""
        shown += f", min_rank={self.min_rank}" if self.min_rank else ""
        return shown + (", at_test='sample'" if self.at_test == "sample" else "")

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "theta":
            super().__setattr__(name, value)
        elif not isinstance(value, Tensor) or value.device == self.theta.device:
            self.theta.fill_(check_theta(value))
        elif not value.is_meta:  # load_state_dict(assign=True) brings θ to the device of the weights
            self._buffers["theta"] = torch.tensor(check_theta(value), dtype=torch.float32, device=value.device)

    def _apply(self, fn: Any, recurse: bool = True) -> TensorDropout:
        # Move θ with the network but keep its float32 value: bf16 would turn .9 into .8984.
        theta = self.theta
        super()._apply(fn, recurse)
        self._buffers["theta"] = theta.to(device="cpu" if self.theta.is_meta else self.theta.device)
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # θ is optional in a state dict: the weights of a plain layer load into a randomized one.
        key = prefix + "theta"
        theta = state_dict.setdefault(key, self.theta)
        if isinstance(theta, Tensor) and theta.numel() == 1 and not theta.is_meta:
            try:
                check_theta(theta)
            except TensorDropoutError as error:
                error_msgs.append(f"{key}: {error}")
                state_dict[key] = self.theta  # θ stays as it was
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def find_dropouts(model: nn.Module) -> list[TensorDropout]:
    """All tensor dropouts inside a model."""
    return [module for module in model.modules() if isinstance(module, TensorDropout)]


def as_dropout(dropout: TensorDropout | float | None) -> TensorDropout | None:
    """The module behind a layer's ``dropout=`` argument; a number is short for ``TensorDropout(number)``."""
    if dropout is None or isinstance(dropout, TensorDropout):
        return dropout
    if isinstance(dropout, nn.Module):
        raise TensorDropoutError(
            f"dropout= takes a td.TensorDropout or a number, the KEEP probability theta (1 - p), got {dropout}"
        )
    return TensorDropout(dropout)


def check_theta(theta: Any) -> float:
    """θ as a float in (0, 1]."""
    if isinstance(theta, Tensor) and theta.numel() == 1:
        theta = theta.item()
    valid = isinstance(theta, int | float) and not isinstance(theta, bool) and 0 < theta <= 1
    if not valid or np.float32(theta) == 0:
        raise TensorDropoutError(
            f"TensorDropout: theta is the KEEP probability, a number in (0, 1], got {theta!r}; theta=1 means no dropout"
        )
    return float(theta)


def _check_modes(modes: Any) -> Literal["all", "outer", "auto"] | tuple[int, ...]:
    if isinstance(modes, str) and modes in ("all", "outer", "auto"):
        return modes  # type: ignore[return-value]
    numbers = isinstance(modes, Sequence) and all(type(mode) is int for mode in modes)
    if not numbers or len(modes) == 0 or len(set(modes)) != len(modes) or isinstance(modes, str):
        raise TensorDropoutError(
            f"TensorDropout: modes is 'all', 'outer', 'auto' or distinct mode numbers, got {modes!r}"
        )
    return tuple(modes)


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise TensorDropoutError(f"TensorDropout: {name} is one of {', '.join(choices)}, got {value!r}")
