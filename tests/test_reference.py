"""The slow truth itself: against the definitions of the formats, the paper's sketches, and sums written out."""

from __future__ import annotations

import pytest
import torch

import tensor_dropout as td
from layers_under_test import every_format, make_input, make_layer
from tensor_dropout import reference

EXACT = {"rtol": 0, "atol": 1e-12}
EQUATIONS = {
    "tucker": "ai,bj,ck,dl,ijkl->abcd",
    "cp": "ar,br,cr,dr->abcd",
    "tt": "iaj,jbk,kcl,ldm->abcd",
    "ring": "iaj,jbk,kcl,ldi->abcd",
}
LAWS = [{"law": law} for law in ("bernoulli", "replacement", "gaussian", "nested")]
LAWS += [{"law": "bernoulli", "min_rank": 1}, {"law": "nested", "min_rank": 3}]
every_law = pytest.mark.parametrize("law", LAWS, ids=lambda law: "-".join(map(str, law.values())))


def small_layer(format, **options):
    return make_layer(format, small=True, dtype=torch.float64, **options)


def parameters(layer):
    return list(layer.cores) if hasattr(layer, "cores") else layer.operands()


def sketch(counts):
    """The paper's M, of shape (K, R): one row for each time that a rank is drawn, so that MᵀM = diag(counts)."""
    return torch.eye(len(counts), dtype=torch.float64).repeat_interleave(counts.long(), dim=0)


@every_format
def test_weight_without_masks_is_the_definition_of_the_format(format):
    layer = small_layer(format, theta=None)
    weight = torch.einsum(EQUATIONS[format], *parameters(layer))
    torch.testing.assert_close(reference.dense_weight(layer, [None] * len(layer._ranks)), weight)


@pytest.mark.parametrize("law", ["bernoulli", "replacement"])
def test_masked_tucker_weight_is_the_papers_sketch(law):
    """Equation 4: ``G ×_n M(n)`` with ``U(n) M(n)ᵀ``."""
    layer = small_layer("tucker", law=law, scaling="paper")
    masks = layer.draw_masks()
    core, factors = layer.core, []
    for mode, mask in enumerate(masks):
        core = torch.tensordot(sketch(mask), core, dims=([1], [mode])).movedim(0, mode)
        factors.append(layer.factors[mode] @ sketch(mask).T)
    weight = torch.einsum(EQUATIONS["tucker"], *factors, core)
    torch.testing.assert_close(reference.dense_weight(layer, masks), weight, **EXACT)


def test_masked_cp_weight_is_the_papers_sketch_of_every_factor():
    """Equation 6: the kept columns of every factor; the one mask counts once."""
    layer = small_layer("cp", scaling="paper")
    (mask,) = layer.draw_masks()
    factors = [factor @ sketch(mask).T for factor in layer.factors]
    weight = torch.einsum(EQUATIONS["cp"], *factors)
    torch.testing.assert_close(reference.dense_weight(layer, [mask]), weight, **EXACT)


def test_masked_tt_weight_has_the_kept_bonds_only():
    layer = small_layer("tt", scaling="paper")
    masks = layer.draw_masks()
    cores = list(layer.cores)
    for n, mask in enumerate(masks):
        kept = mask.bool()
        cores[n], cores[n + 1] = cores[n][:, :, kept], cores[n + 1][kept]
    weight = torch.einsum(EQUATIONS["tt"], *cores)
    torch.testing.assert_close(reference.dense_weight(layer, masks), weight, **EXACT)


def test_masked_ring_weight_has_the_kept_bonds_only():
    layer = small_layer("ring", scaling="paper")
    masks = layer.draw_masks()
    cores = list(layer.cores)
    for n, mask in enumerate(masks):
        kept = mask.bool()
        cores[n - 1], cores[n] = cores[n - 1][:, :, kept], cores[n][kept]
    weight = torch.einsum(EQUATIONS["ring"], *cores)
    torch.testing.assert_close(reference.dense_weight(layer, masks), weight, **EXACT)


@every_format
def test_regress_sums_over_all_entries_of_the_input(format):
    shape = {"output_shape": (2, 2), "rank": 2}
    layer = small_layer(format, **shape)
    masks, x = layer.draw_masks(), make_input(layer)
    y = torch.einsum("zabc,abcop->zop", x, reference.dense_weight(layer, masks)) + layer.bias
    torch.testing.assert_close(reference.regress(layer, x, masks), y, **EXACT)
    without = small_layer(format, bias=False, **shape)
    torch.testing.assert_close(reference.regress(without, x, masks), y - layer.bias, **EXACT)


@every_format
@every_law
def test_all_masks_have_probability_one_together_and_mean_one_when_inverted(format, law):
    layer = small_layer(format, modes="all" if format == "cp" else (1, 2), **law)
    chances, masks = zip(*reference.all_masks(layer), strict=True)
    chances = torch.stack(chances)
    assert chances.sum().item() == pytest.approx(1, abs=1e-12)
    for drawn in ([each[axis] for each in masks] for axis in layer.dropped_axes):
        mean = chances @ torch.stack(drawn)
        torch.testing.assert_close(mean, torch.ones_like(mean), **EXACT)


@pytest.mark.parametrize(
    ("format", "options", "count"),
    [
        ("tucker", {}, 8**4),
        ("tucker", {"modes": (0, 2)}, 8**2),
        ("tucker", {"rank": (3, 1, 1, 2)}, 8 * 4),
        ("tucker", {"law": "nested"}, 3**4),
        ("cp", {}, 16),
        ("tt", {"modes": (2,)}, 8),
        ("ring", {"modes": (0, 2)}, 8 * 8),
    ],
)
def test_all_masks_are_those_of_the_dropped_axes(format, options, count):
    layer = small_layer(format, **options)
    listed = [masks for _, masks in reference.all_masks(layer)]
    assert len(listed) == count
    for axis in range(len(layer._ranks)):
        assert (listed[0][axis] is not None) == (axis in layer.dropped_axes)


@every_format
def test_a_plain_layer_has_one_mask_which_is_none(format):
    layer = small_layer(format, theta=None)
    ((chance, masks),) = reference.all_masks(layer)
    assert chance == 1
    assert masks == [None] * len(layer._ranks)
    torch.testing.assert_close(reference.mean_weight(layer), layer.dense_weight(), **EXACT)


@every_format
@pytest.mark.parametrize("scaling", ["inverted", "paper"])
@every_law
def test_mean_weight_is_the_layers(format, scaling, law):
    rank = {"tucker": (3, 1, 1, 3), "cp": 4, "tt": (3, 1, 3), "ring": (3, 1, 3, 1)}[format]
    layer = small_layer(format, scaling=scaling, rank=rank, **law)
    torch.testing.assert_close(reference.mean_weight(layer), layer.dense_weight(), **EXACT)


@every_format
def test_mean_covariance_and_expected_loss_fit_together(format):
    """``E‖y - f‖² = ‖y - E f‖² + Σ_o Var f_o``, and all of them against draws."""
    rank = {"tucker": (3, 2, 1, 3), "cp": 4, "tt": (3, 2, 3), "ring": (2, 3, 1, 2)}[format]
    layer = small_layer(format, rank=rank, theta=0.6, per_sample=True)
    x = make_input(layer, 2)
    y = torch.ones(2, 3, dtype=torch.float64)
    mean, covariance = reference.mean_and_covariance(layer, x)
    assert mean.shape == (2, 3)
    assert covariance.shape == (2, 3, 3)
    torch.testing.assert_close(mean, layer.eval()(x), **EXACT)
    torch.testing.assert_close(covariance, covariance.mT, **EXACT)
    loss = (mean - y).square().mean() + covariance.diagonal(dim1=1, dim2=2).mean()
    torch.testing.assert_close(reference.expected_mse(layer, x, y), loss, **EXACT)
    with torch.no_grad():
        draws = layer.train()(x[:1].expand(20_000, *layer.input_shape))
    deviations = draws - mean[0]
    products = deviations[:, :, None] * deviations[:, None, :]
    assert ((products.mean(0) - covariance[0]).abs() < 5 * products.std(0) / len(draws) ** 0.5).all()


def test_a_law_that_cannot_list_its_masks_is_refused():
    class Unlisted(td.ExchangeableLaw):
        def draw(self, shape, theta, *, device):
            return torch.ones(shape)

        def pair_moments(self, R, theta):
            return theta, theta, theta

        def support(self, R, theta):
            return None

    with pytest.raises(td.TensorDropoutError, match="cannot list its masks"):
        reference.mean_weight(small_layer("cp", law=Unlisted()))
