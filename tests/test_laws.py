"""Laws of the random diagonal: closed forms against enumeration, and draws against closed forms."""

from __future__ import annotations

import pytest
import torch

import tensor_dropout as td
from layers_under_test import every_format, make_input, make_layer
from tensor_dropout import reference
from tensor_dropout.layers import laws
from tensor_dropout.layers.laws import Bernoulli, Gaussian, Nested, Replacement

THETAS = (1.0, 0.7, 0.5, 0.1)


class ExactCount(td.ExchangeableLaw):
    """A user's own law: exactly R // 2 ranks are kept (at least one), whatever θ."""

    def kept(self, R):
        return max(1, R // 2)

    def draw(self, shape, theta, *, device):
        order = torch.rand(shape, device=device).argsort(-1).argsort(-1)
        return (order < self.kept(shape[-1])).float()

    def pair_moments(self, R, theta):
        k = self.kept(R)
        mean = torch.tensor(k / R, dtype=torch.float64)
        return mean, mean, torch.tensor(k * (k - 1) / max(1, R * (R - 1)), dtype=torch.float64)

    def support(self, R, theta):
        masks = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * R).reshape(-1, R)
        masks = masks[masks.sum(-1) == self.kept(R)]
        return masks, torch.full((len(masks),), 1 / len(masks), dtype=torch.float64)


def describe(law):
    return type(law).__name__ + (f"-min{law.min_rank}" if hasattr(law, "min_rank") else "")


def laws_for(R, min_ranks=None):
    minima = range(R + 1) if min_ranks is None else min_ranks
    with_minimum = [law(k) for law in (Bernoulli, Nested) for k in minima]
    return [*with_minimum, Replacement(), Gaussian(), ExactCount()]


SMALL = [pytest.param(law, R, id=f"{describe(law)}-R{R}") for R in (1, 2, 3, 5) for law in laws_for(R)]
LARGE = [pytest.param(law, id=describe(law)) for law in laws_for(64, min_ranks=(0, 1, 8, 63, 64))]
every_theta = pytest.mark.parametrize("theta", [torch.tensor(theta) for theta in THETAS], ids=lambda t: f"{t:.1f}")


def assert_within_error(samples, exact):
    """The mean of samples (N, ..) is ``exact`` to 5 standard errors, and to float32 rounding where all are equal."""
    error = samples.std(0) / len(samples) ** 0.5
    assert ((samples.mean(0) - exact).abs() <= 5 * error + 1e-6).all()


@every_theta
@pytest.mark.parametrize(("law", "R"), SMALL)
def test_moments_are_those_of_the_enumerated_masks(law, R, theta):
    masks, chances = law.support(R, theta)
    assert masks.shape == (len(chances), R)
    assert (chances >= 0).all()
    assert chances.sum().item() == pytest.approx(1, abs=1e-12)
    mean = torch.einsum("m,mr->r", chances, masks)
    second_moment = torch.einsum("m,mr,ms->rs", chances, masks, masks)
    torch.testing.assert_close(law.mean(R, theta), mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(law.second_moment(R, theta), second_moment, rtol=0, atol=1e-12)


@every_theta
@pytest.mark.parametrize(("law", "R"), [case for case in SMALL if hasattr(case.values[0], "covariance_root")])
def test_covariance_root_is_a_root_of_the_covariance(law, R, theta):
    mean, root = law.mean(R, theta), law.covariance_root(R, theta)
    covariance = law.second_moment(R, theta) - mean[:, None] * mean
    torch.testing.assert_close(root.mT @ root, covariance, rtol=0, atol=1e-12)


@pytest.mark.parametrize("theta", [torch.tensor(0.7), torch.tensor(0.1)], ids=lambda t: f"{t:.1f}")
@pytest.mark.parametrize(("law", "R"), [case for case in SMALL if "Gaussian" not in case.id])
def test_draws_are_the_enumerated_masks_at_their_probabilities(law, R, theta):
    masks, chances = law.support(R, theta)
    drawn = law.draw((20_000, R), theta, device="cpu").double()
    hits = (drawn[:, None] == masks).all(-1)
    assert hits.any(1).all(), "a draw outside the support"
    assert not hits[:, chances == 0].any(), "a draw of probability 0"
    assert_within_error(hits.double(), chances)


@every_theta
@pytest.mark.parametrize("law", LARGE)
def test_moments_of_draws_at_sizes_too_large_to_enumerate(law, theta):
    R, n = 64, 20_000
    c = law.draw((n, R), theta, device="cpu").double()
    assert_within_error(c, law.mean(R, theta))
    second, fourth = c.T @ c / n, (c**2).T @ (c**2) / n
    error = ((fourth - second**2).clamp(min=0) / n).sqrt()
    assert ((second - law.second_moment(R, theta)).abs() <= 5 * error + 1e-6).all()


def test_gaussian_draws_are_normal():
    theta = torch.tensor(0.5)  # variance (1-θ)/θ = 1
    z = Gaussian().draw((100_000, 1), theta, device="cpu").double() - 1
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3), (6, 15)):
        assert_within_error(z**power, torch.tensor([float(moment)]))


@pytest.mark.parametrize(
    ("law", "mean", "second_moment"),
    [
        pytest.param(Bernoulli(), [0.75, 0.75], [[0.75, 0.5625], [0.5625, 0.75]], id="bernoulli"),
        # P(at least one of two) = 15/16; E[c] = 12/15, E[c_0 c_1] = 9/15.
        pytest.param(Bernoulli(1), [0.8, 0.8], [[0.8, 0.6], [0.6, 0.8]], id="bernoulli-min1"),
        # K = ⌊1.5⌋ = 1 draw out of two.
        pytest.param(Replacement(), [0.5, 0.5], [[0.5, 0.0], [0.0, 0.5]], id="replacement"),
        pytest.param(Gaussian(), [1, 1], [[4 / 3, 1], [1, 4 / 3]], id="gaussian"),
        # k = 2 with probability 3/4 + 1/8.
        pytest.param(Nested(), [1, 0.875], [[1, 0.875], [0.875, 0.875]], id="nested"),
        pytest.param(Nested(2), [1, 1], [[1, 1], [1, 1]], id="nested-min2"),
    ],
)
def test_moments_worked_out_by_hand(law, mean, second_moment):
    theta = torch.tensor(0.75)
    torch.testing.assert_close(law.mean(2, theta), torch.tensor(mean, dtype=torch.float64))
    torch.testing.assert_close(law.second_moment(2, theta), torch.tensor(second_moment, dtype=torch.float64))


@pytest.mark.parametrize("min_rank", range(1, 9))
@pytest.mark.parametrize("law", [Bernoulli, Nested])
def test_at_least_min_rank_survive_in_every_draw(law, min_rank):
    drawn = law(min_rank).draw((10_000, 8), torch.tensor(0.1), device="cpu")
    assert set(drawn.unique().tolist()) <= {0.0, 1.0}
    assert drawn.sum(-1).min() == min_rank


def test_bernoulli_without_min_rank_may_drop_everything_and_nested_may_not():
    assert Bernoulli().draw((10_000, 8), torch.tensor(0.1), device="cpu").sum(-1).min() == 0
    assert Nested().draw((10_000, 8), torch.tensor(0.1), device="cpu").sum(-1).min() == 1


def test_nested_keeps_the_first_ranks():
    drawn = Nested().draw((1000, 8), torch.tensor(0.1), device="cpu")
    assert (drawn[:, :-1] >= drawn[:, 1:]).all()
    assert drawn.sum(-1).unique().tolist() == list(range(1, 9))


@pytest.mark.parametrize("R", [1, 2, 7, 512])
@pytest.mark.parametrize("theta", [0.02, 0.5, 0.9])
def test_min_rank_of_all_ranks_keeps_all_of_them(R, theta):
    for law in (Bernoulli(R), Nested(R)):
        assert (law.draw((50, R), torch.tensor(theta), device="cpu") == 1).all()
        torch.testing.assert_close(law.mean(R, torch.tensor(theta)), torch.ones(R, dtype=torch.float64))
        torch.testing.assert_close(law.second_moment(R, torch.tensor(theta)), torch.ones(R, R, dtype=torch.float64))


def test_conditional_moments_survive_a_condition_of_tiny_probability():
    """P(Bin(1024, 0.1) ≥ 800) is below the smallest float64; the moments given that event are not."""
    law, theta = Bernoulli(800), torch.tensor(0.1)
    assert (law.draw((100, 1024), theta, device="cpu").sum(-1) >= 800).all()
    mean = law.mean(1024, theta)[0].item()
    assert 800 / 1024 <= mean < 802 / 1024
    assert law.second_moment(1024, theta).isfinite().all()


# With replacement.


@pytest.mark.parametrize(
    ("theta", "R", "K"),
    [
        (0.7, 10, 7),  # float32 0.7 is below 0.7
        (0.3, 10, 3),
        (0.1, 10, 1),
        (0.9, 10, 9),
        (0.29, 100, 29),
        (0.57, 100, 57),
        (0.699, 10, 6),
        (0.99, 10, 9),
        (0.05, 10, 1),
        (0.1, 1, 1),
        (1.0, 10, 10),
        (1.0, 1, 1),
        (0.8, 512, 409),
    ],
)
def test_number_of_draws_with_replacement(theta, R, K):
    law, theta = Replacement(), torch.tensor(theta)
    assert law.draws(R, theta).item() == K
    counts = law.draw((200, R), theta, device="cpu")
    assert (counts.sum(-1) == K).all()
    assert (counts == counts.round()).all()
    assert (counts >= 0).all()


# At θ = 1 nothing is dropped.

UNIFORM_ENDS = [0.0, 1 - 2**-24]
KEEP_ALL_AT_ONE = [Bernoulli(), Bernoulli(1), Bernoulli(3), Nested(), Nested(3), Gaussian()]


@pytest.mark.parametrize("law", KEEP_ALL_AT_ONE, ids=describe)
@pytest.mark.parametrize("shape", [(3,), (5,), (1000, 7)], ids=str)
def test_theta_one_draws_ones(law, shape):
    assert torch.equal(law.draw(shape, torch.tensor(1.0), device="cpu"), torch.ones(shape))
    assert torch.equal(law.mean(shape[-1], torch.tensor(1.0)), torch.ones(shape[-1], dtype=torch.float64))


@pytest.mark.parametrize("uniform", UNIFORM_ENDS)
@pytest.mark.parametrize("law", KEEP_ALL_AT_ONE, ids=describe)
def test_theta_one_draws_ones_also_at_the_ends_of_the_uniform(monkeypatch, law, uniform):
    monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.full(shape, uniform))
    assert torch.equal(law.draw((4, 5), torch.tensor(1.0), device="cpu"), torch.ones(4, 5))


@pytest.mark.parametrize("uniform", UNIFORM_ENDS)
def test_draws_are_possible_also_at_the_ends_of_the_uniform(monkeypatch, uniform):
    monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.full(shape, uniform))
    for R in (1, 3, 7, 1000):
        for law in (Bernoulli(), Bernoulli(1), Nested(), Nested(1), Replacement()):
            c = law.draw((2, R), torch.tensor(0.5), device="cpu")
            assert c.shape == (2, R)
            assert (c >= 0).all()
            assert (c.sum(-1) >= getattr(law, "min_rank", 0)).all()


def test_theta_one_still_repeats_with_replacement():
    drawn = Replacement().draw((100, 8), torch.tensor(1.0), device="cpu")
    assert drawn.max() > 1
    assert drawn.min() == 0


# Shapes.


@pytest.mark.parametrize("law", laws_for(6, min_ranks=(0, 2)), ids=describe)
def test_draws_have_the_shape_asked_for_and_samples_differ(law):
    theta = torch.tensor(0.5)
    assert law.draw((6,), theta, device="cpu").shape == (6,)
    batch = law.draw((40, 6), theta, device="cpu")
    assert batch.shape == (40, 6)
    assert batch.dtype == torch.float32
    assert len(batch.unique(dim=0)) > 2
    assert law.draw((2, 5, 6), theta, device="cpu").shape == (2, 5, 6)
    assert law.mean(6, theta).shape == (6,)
    assert law.second_moment(6, theta).shape == (6, 6)


@pytest.mark.parametrize("law", laws_for(6, min_ranks=(0, 2)), ids=describe)
def test_equal_seeds_draw_equal_masks(law):
    drawn = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        drawn.append(law.draw((50, 6), torch.tensor(0.5), device="cpu"))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.fixture
def default_dtype():
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("law", laws_for(6, min_ranks=(0, 2))[:-1], ids=describe)
def test_draws_do_not_depend_on_the_default_dtype(default_dtype, law, dtype):
    """Uniform numbers in bf16 have 8 bits: 0.7 would become 0.703."""
    torch.manual_seed(5)
    expected = law.draw((200, 6), torch.tensor(0.7, dtype=torch.float32), device="cpu")
    default_dtype(dtype)
    torch.manual_seed(5)
    drawn = law.draw((200, 6), torch.tensor(0.7, dtype=torch.float32), device="cpu")
    assert drawn.dtype == torch.float32
    assert torch.equal(drawn, expected)


# Laws of the user's own (what is refused is in test_bad_input.py).


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(laws, "_REGISTERED", {})


def test_every_law_implements_the_protocol():
    assert all(isinstance(law, td.Law) for law in laws_for(3))
    assert not isinstance(object(), td.Law)


def test_a_registered_law_is_found_by_its_name(registry):
    law = ExactCount()
    td.register_law("exact-count", law)
    assert td.TensorDropout(0.5, law="exact-count").law is law
    assert laws.law_name(law) == "exact-count"
    assert "law='exact-count'" in repr(td.TensorDropout(0.5, law=law))
    assert laws.law_name(ExactCount()) is None
    assert "law='ExactCount'" in repr(td.TensorDropout(0.5, law=ExactCount()))
    assert list(laws.known_laws()) == ["bernoulli", "nested", "replacement", "gaussian", "exact-count"]


def test_an_exchangeable_law_must_say_its_moments():
    class Incomplete(td.ExchangeableLaw):
        def draw(self, shape, theta, *, device):
            return torch.ones(shape)

    with pytest.raises(TypeError, match="abstract"):
        Incomplete()


def make_law(moments, name="Mine"):
    """A law of a new class, as a cell of a notebook that is run again makes it."""

    def pair_moments(self, R, theta):
        return tuple(torch.tensor(value, dtype=torch.float64) for value in moments)

    def draw(self, shape, theta, *, device):
        return torch.ones(shape, device=device)

    return type(name, (td.ExchangeableLaw,), {"draw": draw, "pair_moments": pair_moments})()


def test_an_exchangeable_law_needs_no_support():
    law = make_law((1.0, 1.0, 1.0))
    assert law.support(4, torch.tensor(0.5)) is None
    layer = td.CPRegression((4, 3, 3), 2, rank=3, dropout=td.TensorDropout(0.5, law=law))
    assert layer.moments(torch.randn(2, 4, 3, 3)).variance.abs().max() < 1e-6


def test_a_law_of_the_same_class_replaces_the_one_before(registry):
    td.register_law("mine", make_law((1.0, 1.0, 1.0)))
    again = make_law((1.0, 2.0, 1.0))
    td.register_law("mine", again)
    assert td.TensorDropout(0.5, law="mine").law is again
    for name, law in (("mine", make_law((1.0, 2.0, 1.0), "Other")), ("bernoulli", Bernoulli())):
        with pytest.raises(td.TensorDropoutError, match=f"the name '{name}' is taken by another law"):
            td.register_law(name, law)
    assert td.TensorDropout(0.5, law="mine").law is again


@pytest.mark.parametrize(
    "moments",
    [(0.8, 0.5, 0.5), (0.5, 0.5, 0.6), (0.5, 0.5, 0.0)],
    ids=["E[c²] < E[c]²", "E[c_r c_s] > E[c²]", "too opposed"],
)
def test_moments_that_nothing_random_has_are_refused(registry, moments):
    law = make_law(moments)
    with pytest.raises(td.TensorDropoutError, match=r"Mine .*states moments that nothing random has: at R=\d, θ=0.5"):
        td.register_law("mine", law)
    with pytest.raises(td.TensorDropoutError, match="states moments that nothing random has"):
        td.TensorDropout(0.5, law=law)


def test_a_law_that_is_not_for_every_rank_is_let_through(registry):
    law = make_law((0.5, 0.5, 0.25))
    type(law).pair_moments = lambda self, R, theta: {16: (theta, theta, theta * theta)}[R]
    td.register_law("mine", law)
    with torch.device("meta"):
        td.TensorDropout(0.5, law=make_law((0.8, 0.9, 0.8)))


@every_format
@pytest.mark.parametrize("scaling", ["inverted", "paper"])
def test_a_law_of_the_users_own_has_the_right_mean_in_a_layer(format, scaling):
    layer = make_layer(format, law=ExactCount(), scaling=scaling, small=True, dtype=torch.float64)
    x = make_input(layer)
    mean, _ = reference.mean_and_covariance(layer, x)
    torch.testing.assert_close(mean, layer.eval()(x), rtol=0, atol=1e-12)
    assert any(not torch.equal(layer.train()(x), layer(x)) for _ in range(5))
