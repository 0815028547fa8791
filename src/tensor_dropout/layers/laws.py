"""Laws of the random diagonal ``c`` that tensor dropout puts on a rank axis.

A law draws ``c`` unscaled and knows its mean ``E[c]`` and second moments ``E[c cᵀ]``. All formulas are those of
``docs/reference/laws.md``. θ (``theta``) is the KEEP probability: at θ = 1
every law but :class:`Replacement` keeps every rank.

Masks are written as comparisons of ``torch.rand`` because those trace, compile and export to ONNX with the right
rate; the moments are computed in float64 because ratios of binomial tails lose digits in float32.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from tensor_dropout.errors import TensorDropoutError


@runtime_checkable
class Law(Protocol):
    """What a law of tensor dropout must offer; write a class with these methods for a law of your own.

    ``theta`` arrives as a 0-d tensor, so that its value can change without recompiling; compute with tensor
    operations only. ``R`` is the size of the rank axis. A law may also offer ``covariance_root(R, theta)``, a
    matrix L with ``Cov[c] = LᵀL``; without it the exact moments find one from ``second_moment``. A law whose entries
    are independent and alike, whatever R, may say so by ``independent = True``: all rank axes are then drawn at once.

    Example: a law that keeps exactly one half of the ranks, whatever θ.

        >>> import torch, tensor_dropout as td
        >>> class Half:
        ...     def draw(self, shape, theta, *, device):
        ...         order = torch.rand(shape, device=device).argsort(-1).argsort(-1)
        ...         return (order < shape[-1] // 2).float()
        ...     def mean(self, R, theta):
        ...         return torch.full((R,), (R // 2) / R, dtype=torch.float64, device=theta.device)
        ...     def second_moment(self, R, theta):
        ...         return None   # not known: layer.moments(x) will ask for n_samples=
        ...     def support(self, R, theta):
        ...         return None
        >>> layer = td.CPRegression((8, 4, 4), 10, rank=6, dropout=td.TensorDropout(0.5, law=Half()))
        >>> layer(torch.randn(2, 8, 4, 4)).shape
        torch.Size([2, 10])
    """

    def draw(self, shape: tuple[int, ...], theta: Tensor, *, device: torch.device) -> Tensor:
        """Draw ``c``, unscaled: a float tensor of ``shape``, whose last axis is the rank axis."""
        ...

    def mean(self, R: int, theta: Tensor) -> Tensor:
        """``E[c]``, of shape ``(R,)``."""
        ...

    def second_moment(self, R: int, theta: Tensor) -> Tensor | None:
        """``E[c cᵀ]``, of shape ``(R, R)``, or None if it is not known in closed form."""
        ...

    def support(self, R: int, theta: Tensor) -> tuple[Tensor, Tensor] | None:
        """All masks ``(M, R)`` with their probabilities ``(M,)``, for enumeration; None if there are too many."""
        ...


class ExchangeableLaw(ABC):
    """A law under which all ranks are alike: ``E[c cᵀ] = t 11ᵀ + v I``.

    Its mean and these two numbers describe it, so the exact moments of a layer cost no more than sums and sums of
    squares. A custom law may derive from this class to get the same speed: it needs ``draw`` and ``pair_moments``.
    """

    @abstractmethod
    def draw(self, shape: tuple[int, ...], theta: Tensor, *, device: torch.device) -> Tensor:
        """Draw ``c``, unscaled."""

    def draw_inverted(self, shape: tuple[int, ...], theta: Tensor, *, device: torch.device) -> Tensor:
        """Draw ``c / E[c]`` in float32."""
        return (self.draw(shape, theta, device=device) / self.mean(shape[-1], theta)).float()

    @abstractmethod
    def pair_moments(self, R: int, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``(E[c_r], E[c_r²], E[c_r c_s])`` for ``r ≠ s``, each a 0-d tensor."""

    def mean(self, R: int, theta: Tensor) -> Tensor:
        """``E[c]``, of shape ``(R,)``."""
        return self.pair_moments(R, theta)[0].expand(R)

    def second_moment(self, R: int, theta: Tensor) -> Tensor:
        """``E[c cᵀ] = t 11ᵀ + v I``, of shape ``(R, R)``."""
        _, square, product = self.pair_moments(R, theta)
        identity = torch.eye(R, dtype=square.dtype, device=square.device)
        return product + (square - product) * identity

    def support(self, R: int, theta: Tensor) -> tuple[Tensor, Tensor] | None:
        """All masks with their probabilities; None, as here, if they are not to be enumerated."""
        return None


class Bernoulli(ExchangeableLaw):
    """Each rank is kept independently with probability θ (the paper's law).

    With ``min_rank=k`` the draw is conditioned on at least ``k`` survivors; mean and second moments are then the
    conditional ones, ratios of binomial tails:
    ``E[c] = θ P(Bin(R-1,θ) ≥ k-1) / P(Bin(R,θ) ≥ k)``, ``E[c_r c_s] = θ² P(Bin(R-2,θ) ≥ k-2) / P(Bin(R,θ) ≥ k)``.
    """

    def __init__(self, min_rank: int = 0) -> None:
        self.min_rank = min_rank

    def draw(self, shape: tuple[int, ...], theta: Tensor, *, device: torch.device) -> Tensor:
        """Draw 0/1 masks; under ``min_rank`` the number of survivors first, then which ones."""
        scores = uniform(shape, device)
        if self.min_rank == 0:
            return (scores < theta).float()
        chances = log_binomial(shape[-1], precise(theta), self.min_rank).softmax(0)
        edges = chances.cumsum(0)[:-1].float()
        survivors = self.min_rank + (uniform((*shape[:-1], 1), device) >= edges).sum(-1, keepdim=True)
        return (scores.argsort(-1).argsort(-1) < survivors).float()

    @property
    def independent(self) -> bool:
        """Whether the entries are independent; a subclass with a draw of its own must say so itself."""
        return self.min_rank == 0 and type(self).draw is Bernoulli.draw

    def draw_inverted(self, shape: tuple[int, ...], theta: Tensor, *, device: torch.device) -> Tensor:
        """Draw ``c / E[c]``; without ``min_rank`` in three kernels, which matters on a GPU."""
        if not self.independent:
            return super().draw_inverted(shape, theta, device=device)
        return (uniform(shape, device) < theta) / theta

    def pair_moments(self, R: int, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``(m, m, t)``: for a 0/1 mask ``c² = c``."""
        theta, k = precise(theta), self.min_rank
        if k == 0:
            return theta, theta, theta * theta
        tail = log_tail(R, theta, k)
        mean = theta * (log_tail(R - 1, theta, k - 1) - tail).exp()
        return mean, mean, theta * theta * (log_tail(R - 2, theta, k - 2) - tail).exp()

    def support(self, R: int, theta: Tensor) -> tuple[Tensor, Tensor]:
        """All ``2^R`` masks (those with at least ``min_rank`` ones), with their conditional probabilities."""
        masks = all_tuples((0.0, 1.0), R, theta.device)
        kept = masks.sum(-1)
        weights = precise(theta) ** kept * (1 - precise(theta)) ** (R - kept)
        weights = torch.where(kept >= self.min_rank, weights, 0.0)
        return masks, weights / weights.sum()


class Replacement(ExchangeableLaw):
    """``c`` counts ``K = max(1, ⌊θR⌋)`` uniform draws with replacement (the paper's second law).

    The paper prints ``K = R ÷ θ``, which would be at least R; it is read as ``⌊θR⌋``. At θ = 1 the draws still
    repeat: a bootstrap of the ranks.
    """

    def draw(self, shape: tuple[int, ...], theta: Tensor, *, device: torch.device) -> Tensor:
        """Draw R indices and count the first K of them: the shapes do not depend on θ."""
        R = shape[-1]
        chosen = (uniform(shape, device) * R).long().clamp(max=R - 1)
        counted = (torch.arange(R, device=device) < self.draws(R, theta)).float().expand(shape)
        return torch.zeros(shape, device=device, dtype=counted.dtype).scatter_add(-1, chosen, counted)

    def draws(self, R: int, theta: Tensor) -> Tensor:
        """``K = max(1, ⌊θR⌋)``; 1e-6 absorbs the float32 rounding of θ (0.7 · 10 must give 7, not 6)."""
        return ((precise(theta) + 1e-6) * R).floor().clamp(1, R)

    def pair_moments(self, R: int, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``K/R``, ``K/R + K(K-1)/R²``, ``K(K-1)/R²``."""
        K = self.draws(R, theta)
        product = K * (K - 1) / R**2
        return K / R, K / R + product, product

    def support(self, R: int, theta: Tensor) -> tuple[Tensor, Tensor]:
        """All count vectors of K draws, with multinomial probabilities."""
        K = int(self.draws(R, theta))
        counts = [c for c in itertools.product(range(K + 1), repeat=R) if sum(c) == K]
        ways = [math.factorial(K) / math.prod(map(math.factorial, c)) / R**K for c in counts]
        masks = torch.tensor(counts, dtype=torch.float64, device=theta.device)
        return masks, torch.tensor(ways, dtype=torch.float64, device=theta.device)


class Gaussian(ExchangeableLaw):
    """Multiplicative noise ``c ~ N(1, (1-θ)/θ)``: the mean and variance of inverted Bernoulli, without zeros."""

    def draw(self, shape: tuple[int, ...], theta: Tensor, *, device: torch.device) -> Tensor:
        """Draw ``1 + σ ε`` with ``σ² = (1-θ)/θ``."""
        return 1 + ((1 - theta) / theta).sqrt() * torch.randn(shape, device=device, dtype=torch.float32)

    @property
    def independent(self) -> bool:
        """Whether the entries are independent; a subclass with a draw of its own must say so itself."""
        return type(self).draw is Gaussian.draw

    def pair_moments(self, R: int, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``1``, ``1 + (1-θ)/θ``, ``1``."""
        theta = precise(theta)
        one = torch.ones_like(theta)
        return one, 1 + (1 - theta) / theta, one

    def support(self, R: int, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The ``2^R`` two-point Gauss–Hermite nodes ``1 ± σ``: exact for means and second moments."""
        signs = all_tuples((-1.0, 1.0), R, theta.device)
        sigma = ((1 - precise(theta)) / precise(theta)).sqrt()
        return 1 + sigma * signs, torch.full_like(signs[:, 0], 0.5**R)


class Nested:
    """Only the first ``k`` ranks are kept, so that the ranks learn an order and can be cut off later.

    ``k = R`` with probability θ, else uniform on ``{max(1, min_rank) .. R}``. Then ``E[c_r] = P(k > r)`` and
    ``E[c_r c_s] = P(k > max(r, s))``.
    """

    def __init__(self, min_rank: int = 0) -> None:
        self.min_rank = min_rank

    def draw(self, shape: tuple[int, ...], theta: Tensor, *, device: torch.device) -> Tensor:
        """Draw ``k`` and keep the first ``k`` ranks."""
        R, least = shape[-1], max(1, self.min_rank)
        number = uniform((*shape[:-1], 1), device)
        # Above θ the same number, stretched to [0, 1), chooses k: onnxruntime's random nodes are not independent.
        cut = least + ((number - theta) / (1 - theta) * (R - least + 1)).floor().clamp(max=R - least)
        kept = torch.where(number < theta, R, cut)
        return (torch.arange(R, device=device) < kept).float()

    def mean(self, R: int, theta: Tensor) -> Tensor:
        """``P(k > r)``, of shape ``(R,)``."""
        theta, least = precise(theta), max(1, self.min_rank)
        r = torch.arange(R, dtype=theta.dtype, device=theta.device)
        uniform = (R - r.clamp(min=least - 1)) / (R - least + 1)
        return theta + (1 - theta) * uniform

    def second_moment(self, R: int, theta: Tensor) -> Tensor:
        """``P(k > max(r, s))``, of shape ``(R, R)``."""
        mean = self.mean(R, theta)
        return torch.minimum(mean[:, None], mean[None, :])

    def covariance_root(self, R: int, theta: Tensor) -> Tensor:
        """``L`` with ``Cov[c] = LᵀL``: row j sums the ranks from j on, in closed form.

        ``c / E[c]`` has the covariance ``1/P(k > min(r,s)) - 1 = Σ_j δ_j 1[r ≥ j] 1[s ≥ j]`` with
        ``δ_j = 1/P(k > j) - 1/P(k > j-1)``.
        """
        mean = self.mean(R, theta)
        steps = (1 / mean).diff().clamp(min=0)  # δ_1 .. δ_{R-1}
        return steps.sqrt()[:, None] * torch.ones(R, R, dtype=mean.dtype, device=mean.device).triu()[1:] * mean

    def support(self, R: int, theta: Tensor) -> tuple[Tensor, Tensor]:
        """One mask for each ``k``, with ``P(k) = P(k > k-1) - P(k > k)``."""
        mean = self.mean(R, theta)
        masks = torch.ones(R, R, dtype=mean.dtype, device=mean.device).tril()
        return masks, mean - torch.cat([mean[1:], mean.new_zeros(1)])


def uniform(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Uniform on [0, 1) in float32, whatever the default dtype: bf16 has 8 bits and would keep 0.703 for 0.7."""
    return torch.rand(shape, device=device, dtype=torch.float32)


def precise(theta: Tensor) -> Tensor:
    """θ in float64; Apple's GPUs have none and stay in float32."""
    return theta if theta.device.type == "mps" else theta.double()


def log_binomial(n: int, theta: Tensor, least: int) -> Tensor:
    """``log P(Bin(n, θ) = j)`` for ``j = least..n``; the coefficients are a table, since ONNX has no lgamma."""
    table = [math.lgamma(n + 1) - math.lgamma(j + 1) - math.lgamma(n - j + 1) for j in range(least, n + 1)]
    log_ways = torch.tensor(table, dtype=theta.dtype, device=theta.device)
    j = torch.arange(least, n + 1, dtype=theta.dtype, device=theta.device)
    # At θ = 1 only j = n has any probability: its factor (1-θ)^0 is 1, not exp(0 · -inf).
    log_drop = torch.where(j < n, (n - j) * torch.log1p(-theta), 0.0)
    return log_ways + j * torch.log(theta) + log_drop


def log_tail(n: int, theta: Tensor, least: int) -> Tensor:
    """``log P(Bin(n, θ) ≥ least)`` as a sum of positive terms: 1 minus the other tail would cancel."""
    if least <= 0:
        return torch.zeros_like(theta)
    return log_binomial(n, theta, least).logsumexp(0)


def all_tuples(values: tuple[float, float], R: int, device: torch.device) -> Tensor:
    """All ``2^R`` vectors of length R over two values, in float64."""
    return torch.tensor(list(itertools.product(values, repeat=R)), dtype=torch.float64, device=device)


_BUILT_IN = {"bernoulli": Bernoulli, "nested": Nested, "replacement": Replacement, "gaussian": Gaussian}
_TAKES_MIN_RANK = ("bernoulli", "nested")
_REGISTERED: dict[str, Law] = {}


def register_law(name: str, law: Law) -> None:
    """Give a law of your own a name, so that ``TensorDropout(law=name)``, ``td.save`` and ``td.load`` know it.

    Args:
        name: the name; those of the built-in laws are taken.
        law: an object that implements :class:`Law`.

    Raises:
        TensorDropoutError: if the name is taken by another law, or ``law`` lacks a method of the protocol or has
            moments that nothing random can have.

    A law of your own may be replaced by one of the same class (same module, same name): a cell of a notebook can be run
    again. Layers that were made before keep the law they have.
    """
    check_law(law)
    if not isinstance(name, str) or not name:
        raise TensorDropoutError(f"register_law: a name is a text that is not empty, got {name!r}")
    if name in _BUILT_IN or _name_class(_REGISTERED.get(name, law)) != _name_class(law):
        raise TensorDropoutError(f"register_law: the name {name!r} is taken by another law; choose another one")
    _REGISTERED[name] = law


def _name_class(law: Law) -> tuple[str, str]:
    return type(law).__module__, type(law).__qualname__


def resolve_law(law: str | Law, min_rank: int) -> Law:
    """The law object behind a name or an object."""
    if not isinstance(law, str):
        check_law(law)
        return _refuse_min_rank(law, type(law).__name__, min_rank)
    if law in _TAKES_MIN_RANK:
        return _BUILT_IN[law](min_rank)
    if law in _BUILT_IN:
        return _refuse_min_rank(_BUILT_IN[law](), law, min_rank)
    if law in _REGISTERED:
        return _refuse_min_rank(_REGISTERED[law], law, min_rank)
    raise TensorDropoutError(
        f"TensorDropout: unknown law {law!r}; known are {', '.join(known_laws())}. "
        "Pass an object that implements td.Law, or name one with td.register_law; for the command line, in a module "
        "that is imported first: tensor-dropout --import MODULE ..."
    )


def law_name(law: Law) -> str | None:
    """The name under which a law can be found again, or None for an unregistered object."""
    for name, built_in in _BUILT_IN.items():
        if type(law) is built_in:
            return name
    return next((name for name, registered in _REGISTERED.items() if registered is law), None)


def registered_laws(names: Iterable[str]) -> dict[str, Law]:
    """Those of these names that are laws of the user, with their laws."""
    return {name: _REGISTERED[name] for name in sorted(names) if name in _REGISTERED}


def describe_law(law: Law) -> dict[str, Any]:
    """What identifies a law of the user in a file: its class, its moments and some draws, as JSON types.

    The draws are made with a fixed seed, and the generator of the program stays where it was.
    """
    theta = torch.tensor(0.7, device="cpu")
    described: dict[str, Any] = {"class": ".".join(_name_class(law))}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        probes: dict[str, Callable[[], Tensor | None]] = {
            "mean": lambda: law.mean(4, theta),
            "second_moment": lambda: law.second_moment(4, theta),
            "draws": lambda: law.draw((3, 4), theta, device=theta.device),
        }
        for name, probe in probes.items():
            try:
                found = probe()
            except Exception:  # a law may not be for this R or θ
                found = None
            described[name] = None if found is None else [float(f"{number:.6g}") for number in found.flatten().tolist()]
    return described


def check_same_law(name: str, saved: Mapping[str, Any], where: str) -> None:
    """Refuse a law that is registered under the name of another one.

    Its moments must be those of the saved law. So must its draws, unless its class has the same name and known second
    moments: the draws may then be made in another way.

    Args:
        name: the name in the file.
        saved: what :func:`describe_law` said of the law when it was saved.
        where: the caller, for the message.

    Raises:
        TensorDropoutError: if the law that is registered now is another one.
    """
    if name not in _REGISTERED:
        return  # refused when the layer is built
    present = describe_law(_REGISTERED[name])
    same_moments = all(saved.get(key) == present[key] for key in ("mean", "second_moment"))
    same_class = saved.get("class") == present["class"] and present["second_moment"] is not None
    if not same_moments or not (same_class or saved.get("draws") == present["draws"]):
        raise TensorDropoutError(
            f"{where} was saved with another law {name!r}, of the class {saved.get('class')}; the one that is "
            f"registered now, a {present['class']}, has other moments or draws. Register the law of the file with "
            "td.register_law, and this one under another name"
        )


def known_laws() -> Iterator[str]:
    """Names that ``TensorDropout(law=...)`` accepts."""
    yield from _BUILT_IN
    yield from _REGISTERED


def check_law(law: object) -> None:
    """Raise if an object does not implement :class:`Law`."""
    if not isinstance(law, Law) or isinstance(law, type):
        lacking = [m for m in ("draw", "mean", "second_moment", "support") if not hasattr(law, m)]
        what = f"lacks {', '.join(lacking)}" if lacking else "is a class; pass an instance of it"
        raise TensorDropoutError(f"TensorDropout: law {law!r} {what} (see td.Law)")
    if type(law) not in _BUILT_IN.values():
        for R, theta in itertools.product((3, 8), (0.5, 0.8)):
            _check_moments(law, R, theta)


def _check_moments(law: Law, R: int, theta: float) -> None:
    """Raise if no random vector has the moments that a law states: ``E[c cᵀ] - E[c] E[c]ᵀ`` must not be negative."""
    try:
        value = torch.tensor(theta, device="cpu")
        mean, second = law.mean(R, value).double(), law.second_moment(R, value)
        if second is None:
            return
        least = float(torch.linalg.eigvalsh(second.double() - mean[:, None] * mean)[0])
        size = float(second.diagonal().abs().max())
    except Exception:  # a law may not be for this R or θ; then its layers will say so
        return
    if not least >= -1e-5 * max(size, 1e-12):
        raise TensorDropoutError(
            f"TensorDropout: law {law!r} states moments that nothing random has: at R={R}, θ={theta:g} the covariance "
            f"E[c cᵀ] - E[c] E[c]ᵀ has the eigenvalue {least:.3g}, expected 0 or more; E[c_r²] is at least E[c_r]², "
            "and E[c_r c_s] at most E[c_r²]"
        )


def _refuse_min_rank(law: Law, name: str, min_rank: int) -> Law:
    if min_rank and min_rank != getattr(law, "min_rank", 0):
        raise TensorDropoutError(
            f"TensorDropout: min_rank={min_rank} goes with the laws {' and '.join(_TAKES_MIN_RANK)}, not with "
            f"{name!r}; leave min_rank at 0"
        )
    return law
