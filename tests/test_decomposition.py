"""Decompositions of a weight: exact at full rank, as good as TensorLy's below it, and padded without a change."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest
import torch

from surgery_models import every_factorization
from tensor_dropout.layers.cp import (
    CPDecomposition,
    alternate_least_squares,
    balance,
    cp_misfit,
    khatri_rao,
    random_columns,
    slice_terms,
)
from tensor_dropout.layers.decomposition import left_singular, numerical_rank, pad, threshold_path
from tensor_dropout.layers.formats import FORMATS
from tensor_dropout.layers.ring import RingDecomposition
from tensor_dropout.layers.tt import TTDecomposition
from tensor_dropout.layers.tucker import TuckerDecomposition

SHAPES = [(6, 5), (5, 6), (6, 3, 4), (4, 3, 3, 5), (3, 2, 3, 2, 4), (7, 1, 3, 5), (1, 1, 1, 4)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def draw(shape, seed=0):
    """A weight whose singular values fall, as those of a trained one do."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    for mode, size in enumerate(shape):
        fall = 0.6 ** torch.arange(size, dtype=torch.float64)
        weight = weight * fall.reshape([-1 if n == mode else 1 for n in range(len(shape))])
    return weight


def low_rank(shape, ranks, seed=0):
    """A weight of exact multilinear rank."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(ranks, generator=generator, dtype=torch.float64)
    for mode, (size, R) in enumerate(zip(shape, ranks, strict=True)):
        factor = torch.randn(size, R, generator=generator, dtype=torch.float64)
        weight = torch.tensordot(factor, weight, ([1], [mode])).movedim(0, mode)
    return weight


def build(factorization, operands):
    """The whole weight from its operands, by numpy."""
    operands = [operand.numpy() for operand in operands]
    if factorization == "tucker":
        *factors, weight = operands
        for mode, factor in enumerate(factors):
            weight = np.moveaxis(np.tensordot(factor, weight, (1, mode)), 0, mode)
        return weight
    if factorization == "cp":
        letters = "abcdefgh"[: len(operands)]
        return np.einsum(",".join(f"{letter}z" for letter in letters) + "->" + letters, *operands)
    weight, *rest = operands
    if factorization == "ring":  # the first core has its channels in front
        weight = weight.transpose(1, 0, 2)
    for core in rest:
        weight = np.tensordot(weight, core, (-1, 0))
    return np.trace(weight, axis1=0, axis2=-1) if factorization == "ring" else weight


def error(factorization, decomposition, ranks, weight):
    found = build(factorization, decomposition.at(ranks))
    return np.linalg.norm(found - weight.numpy()) / np.linalg.norm(weight.numpy())


def ranks_of(factorization, operands):
    if factorization == "tucker":
        return tuple(operands[-1].shape)
    if factorization == "ring":
        return (operands[0].shape[1], *(core.shape[0] for core in operands[1:]))
    return (operands[0].shape[1],) if factorization == "cp" else tuple(core.shape[0] for core in operands[1:])


@every_shape
@every_factorization
def test_exact_at_full_rank(factorization, shape):
    weight = draw(shape)
    decomposition = FORMATS[factorization].decomposition(weight)
    operands = decomposition.at(decomposition.exact_rank)
    assert ranks_of(factorization, operands) == decomposition.exact_rank
    np.testing.assert_allclose(build(factorization, operands), weight.numpy(), atol=1e-13)


@every_factorization
def test_small_singular_values_are_no_rounding_errors(factorization):
    weight = torch.diag(torch.tensor([1.0, 1e-6, 1e-12], dtype=torch.float64))
    decomposition = FORMATS[factorization].decomposition(weight)
    assert max(decomposition.exact_rank) == 3
    found = build(factorization, decomposition.at(decomposition.exact_rank))
    np.testing.assert_allclose(found, weight.numpy(), rtol=1e-9, atol=1e-20)


@every_factorization
@pytest.mark.parametrize("grid", [(3,), (3, 4), (2, 3, 4)])
def test_an_average_is_put_in_exactly(factorization, grid):
    matrix = draw((6, 5))
    decomposition = FORMATS[factorization].decomposition(matrix, grid)
    axes = tuple(range(1, 1 + len(grid)))
    wanted = np.broadcast_to(np.expand_dims(matrix.numpy() / np.prod(grid), axes), (6, *grid, 5))
    np.testing.assert_allclose(build(factorization, decomposition.at(decomposition.exact_rank)), wanted, atol=1e-14)
    assert (
        decomposition.exact_rank
        == {
            "tucker": (5, *(1 for _ in grid), 5),
            "cp": (5,),
            "tt": (5,) * (len(grid) + 1),
            "ring": (1, *(5,) * (len(grid) + 1)),
        }[factorization]
    )
    for rank, singular in zip(decomposition.path, np.linalg.svd(matrix.numpy())[1][1:], strict=False):
        found = build(factorization, decomposition.at(rank)).sum(axes)
        assert np.linalg.norm(found - matrix.numpy(), 2) == pytest.approx(singular)  # Eckart-Young


def test_exact_ranks_are_those_of_the_weight():
    weight = low_rank((6, 4, 4, 5), (3, 2, 4, 2))
    assert TuckerDecomposition(weight).exact_rank == (3, 2, 4, 2)
    assert TTDecomposition(weight).exact_rank == (3, 6, 2)
    assert CPDecomposition(weight).exact_rank[0] <= 4 * 4 * 3
    assert TuckerDecomposition(torch.zeros(3, 4, 5, dtype=torch.float64)).exact_rank == (1, 1, 1)


@every_shape
@every_factorization
def test_the_path_grows_to_the_exact_rank(factorization, shape):
    decomposition = FORMATS[factorization].decomposition(draw(shape))
    path = decomposition.path
    assert all(R == 1 for R in path[0])
    assert path[-1] == decomposition.exact_rank
    for before, after in pairwise(path):
        assert before != after
        assert all(small <= large for small, large in zip(before, after, strict=True))


@every_factorization
@pytest.mark.parametrize("shape", [(6, 5), (6, 3, 4), (4, 3, 3, 5)], ids=str)
def test_the_error_falls_along_the_path(factorization, shape):
    weight = draw(shape)
    decomposition = FORMATS[factorization].decomposition(weight)
    path = decomposition.path if factorization != "cp" else [*decomposition.path[:8], decomposition.path[-1]]
    errors = [error(factorization, decomposition, ranks, weight) for ranks in path]
    # HOOI and least squares stop at a tolerance.
    slack = {"tucker": 1e-5, "cp": 1e-3, "tt": 1e-9, "ring": 1e-9}[factorization]
    assert all(later <= earlier * (1 + slack) + 1e-13 for earlier, later in pairwise(errors))
    assert errors[-1] < 1e-12 < errors[0]


@pytest.fixture
def tensorly():
    """TensorLy on NumPy inside the test: its backend is a global switch that other tests turn, too."""
    module = pytest.importorskip("tensorly", reason="TensorLy is not installed")
    with module.backend_context("numpy", local_threadsafe=True):
        yield module


TENSORLY = [((6, 4, 5), 0), ((5, 3, 3, 4), 1), ((8, 4, 4, 6), 2)]


@pytest.mark.parametrize(("shape", "seed"), TENSORLY)
def test_tucker_is_as_good_as_tensorly(tensorly, shape, seed):
    from tensorly.decomposition import tucker

    weight = draw(shape, seed)
    decomposition = TuckerDecomposition(weight)
    for ranks in [tuple(max(1, size // 2) for size in shape), decomposition.path[len(decomposition.path) // 2]]:
        theirs = tensorly.tucker_to_tensor(tucker(weight.numpy(), ranks, n_iter_max=100, tol=1e-8))
        wanted = np.linalg.norm(theirs - weight.numpy()) / np.linalg.norm(weight.numpy())
        assert error("tucker", decomposition, ranks, weight) <= wanted * (1 + 1e-3)


@pytest.mark.parametrize(("shape", "seed"), TENSORLY)
@pytest.mark.parametrize("R", [1, 3, 6])
def test_cp_is_as_good_as_tensorly(tensorly, shape, seed, R):
    from tensorly.decomposition import parafac

    weight = draw(shape, seed)
    starts = ["svd", "random"]
    fits = [parafac(weight.numpy(), R, init=start, n_iter_max=100, tol=1e-5, random_state=0) for start in starts]
    wanted = min(np.linalg.norm(tensorly.cp_to_tensor(fit) - weight.numpy()) for fit in fits)
    found = error("cp", CPDecomposition(weight), (R,), weight) * np.linalg.norm(weight.numpy())
    assert found <= wanted * (1 + 1e-2)


@pytest.mark.parametrize(("shape", "seed"), TENSORLY)
def test_tt_is_as_good_as_tensorly(tensorly, shape, seed):
    from tensorly.decomposition import tensor_train as train

    weight = draw(shape, seed)
    decomposition = TTDecomposition(weight)
    for ranks in decomposition.path[:: max(1, len(decomposition.path) // 5)]:
        theirs = tensorly.tt_to_tensor(train(weight.numpy(), [1, *ranks, 1]))
        wanted = np.linalg.norm(theirs - weight.numpy()) / np.linalg.norm(weight.numpy())
        assert error("tt", decomposition, ranks, weight) <= wanted * (1 + 1e-6) + 1e-13


RING_RANKS = [((6, 3, 4), (2, 3, 5)), ((4, 3, 3, 5), (2, 2, 4, 6)), ((6, 5), (3, 2)), ((3, 2, 3), (4, 2, 3))]


@pytest.mark.parametrize(("shape", "ranks"), RING_RANKS)
def test_a_ring_has_the_ranks_that_were_asked_for_and_is_exact_where_they_reach(shape, ranks):
    weight = draw(shape)
    decomposition = RingDecomposition(weight)
    operands = decomposition.at(ranks)
    found = ranks_of("ring", operands)
    assert found[:2] == ranks[:2]
    assert all(small <= asked for small, asked in zip(found, ranks, strict=True))
    # Each cut discards at most its own singular values: of the first, and of a train over what is left.
    assert error("ring", decomposition, ranks, weight) < 1
    enough = (2, *(prod(shape) for _ in shape[1:]))
    np.testing.assert_allclose(build("ring", decomposition.at(enough)), weight.numpy(), atol=1e-13)


def test_a_matrix_is_split_over_two_bonds_as_well_as_over_one():
    weight = draw((8, 6))
    found = error("ring", RingDecomposition(weight), (2, 2), weight)
    assert found == pytest.approx(error("tt", TTDecomposition(weight), (4,), weight))


def test_a_truncated_matrix_is_the_best_there_is():
    weight = draw((8, 6))
    spectrum = np.linalg.svd(weight.numpy())[1]
    for factorization, format in FORMATS.items():
        for R in (1, 3, 5):
            ranks = {"tucker": (R, R), "ring": (1, R)}.get(factorization, (R,))
            best = np.linalg.norm(spectrum[R:]) / np.linalg.norm(spectrum)
            assert error(factorization, format.decomposition(weight), ranks, weight) == pytest.approx(best)


def test_tucker_bounds():
    """Truncation loses at most the sum of what each mode loses, and at least the most of them."""
    weight = draw((6, 4, 5))
    for ranks in ((2, 2, 2), (4, 1, 3), (6, 4, 2)):
        tails = [
            np.linalg.norm(
                np.linalg.svd(np.moveaxis(weight.numpy(), n, 0).reshape(len(weight.movedim(n, 0)), -1))[1][R:]
            )
            for n, R in enumerate(ranks)
        ]
        found = error("tucker", TuckerDecomposition(weight), ranks, weight) * np.linalg.norm(weight.numpy())
        assert max(tails) - 1e-12 <= found <= np.linalg.norm(tails) + 1e-12


@pytest.mark.parametrize("factorization", ["tucker", "tt", "ring"])
def test_factors_are_orthonormal(factorization):
    decomposition = FORMATS[factorization].decomposition(draw((5, 3, 3, 4)))
    *bases, _ = decomposition.at(decomposition.path[len(decomposition.path) // 2])
    for basis in bases:
        columns = basis.flatten(0, -2)
        np.testing.assert_allclose(columns.T @ columns, np.eye(columns.shape[1]), atol=1e-12)


def test_the_terms_of_cp_come_longest_first_and_balanced():
    factors = CPDecomposition(draw((5, 3, 3, 4))).at((7,))
    lengths = torch.stack([factor.norm(dim=0) for factor in factors])
    assert torch.allclose(lengths, lengths[:1].expand_as(lengths))
    terms = lengths.prod(0)
    assert (terms[:-1] >= terms[1:] - 1e-12).all()


@every_factorization
def test_the_global_generator_is_not_touched_and_results_repeat(factorization):
    weight = draw((5, 3, 3, 4))
    state = torch.get_rng_state()
    ranks = FORMATS[factorization].decomposition(weight).path[2]
    first = FORMATS[factorization].decomposition(weight).at(ranks)
    second = FORMATS[factorization].decomposition(weight).at(ranks)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))


def test_the_last_operands_are_remembered():
    decomposition = CPDecomposition(draw((5, 3, 4)))
    assert decomposition.operands((3,)) is decomposition.operands((3,))
    assert ranks_of("cp", decomposition.operands((2,))) == (2,)
    assert ranks_of("cp", decomposition.operands((3,))) == (3,)


# Parts.


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4), (1, 6), (6, 1)])
def test_left_singular(shape):
    matrix = draw(shape)
    left, spectrum = left_singular(matrix)
    U, wanted, _ = np.linalg.svd(matrix.numpy(), full_matrices=False)
    np.testing.assert_allclose(spectrum, wanted, atol=1e-14)
    np.testing.assert_allclose(np.abs((left.T @ torch.from_numpy(U)).numpy()), np.eye(min(shape)), atol=1e-9)


def test_numerical_rank():
    assert numerical_rank(torch.tensor([1.0, 1e-3, 1e-17]).double()) == 2
    assert numerical_rank(torch.zeros(3).double()) == 1
    assert numerical_rank(torch.ones(3).double()) == 3


def test_threshold_path_grows_the_mode_that_loses_most():
    path = threshold_path([torch.tensor([3.0, 2.0, 0.1]).double(), torch.tensor([3.0, 1.0]).double()])
    assert path == [(1, 1), (2, 1), (2, 2), (3, 2)]


def test_khatri_rao_and_misfit():
    factors = [draw((size, 3), seed) for seed, size in enumerate((4, 5, 2))]
    weight = torch.einsum("ir,jr,kr->ijk", *factors)
    assert khatri_rao(factors[1:]).shape == (10, 3)
    assert cp_misfit(weight, factors) < 1e-14
    assert cp_misfit(weight + 1, factors) == pytest.approx(40**0.5)


def test_balance_keeps_the_tensor_and_zero_terms():
    factors = [draw((size, 3), seed) for seed, size in enumerate((4, 5, 2))]
    factors[1][:, 2] = 0
    balanced = balance([factors[0] * 1e3, factors[1], factors[2] * 1e-2])
    np.testing.assert_allclose(
        torch.einsum("ir,jr,kr->ijk", *balanced), 10 * torch.einsum("ir,jr,kr->ijk", *factors), atol=1e-12
    )
    assert all(torch.isfinite(factor).all() for factor in balanced)
    assert all((factor[:, 2] == 0).all() for factor in balanced)


def test_least_squares_never_get_worse():
    weight = draw((5, 4, 3))
    start = random_columns(weight, 4, seed=0)
    misfits = [
        cp_misfit(weight, alternate_least_squares(weight, start, sweeps, tolerance=0.0)) for sweeps in (1, 2, 4, 8, 16)
    ]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(misfits))


def test_slices_are_an_exact_cp():
    for shape in SHAPES:
        weight = draw(shape)
        factors, lengths = slice_terms(weight)
        np.testing.assert_allclose(build("cp", [factors[0] * lengths, *factors[1:]]), weight.numpy(), atol=1e-13)
        assert (lengths[:-1] >= lengths[1:]).all()


PADDED = {
    "tucker": ([(4, 2), (3, 1), (5, 2), (2, 1, 2)], [(4, 4), (3, 3), (5, 4), (4, 3, 4)], {3}),
    "cp": ([(4, 2), (3, 2), (5, 2)], [(4, 7), (3, 7), (5, 7)], {2}),
    "tt": ([(4, 2), (2, 3, 2), (2, 5)], [(4, 4), (4, 3, 5), (5, 5)], set()),
    "ring": ([(4, 2, 2), (2, 3, 2), (2, 5, 2)], [(4, 3, 4), (4, 3, 5), (5, 5, 3)], set()),
}


@every_factorization
def test_padding_does_not_change_the_tensor(factorization):
    shapes, wanted, zero = PADDED[factorization]
    operands = [draw(shape, seed) for seed, shape in enumerate(shapes)]
    state = torch.get_rng_state()
    padded = pad(operands, [torch.empty(shape) for shape in wanted], zero)
    assert torch.equal(torch.get_rng_state(), state)
    assert [tuple(operand.shape) for operand in padded] == wanted
    np.testing.assert_allclose(build(factorization, padded), build(factorization, operands), atol=1e-14)
    for operand, old in zip(padded, operands, strict=True):
        assert torch.equal(operand[tuple(slice(size) for size in old.shape)], old)


def test_padded_columns_are_orthonormal_to_the_old_ones_where_there_is_room():
    basis = torch.linalg.qr(draw((6, 2))).Q
    core = draw((2, 2))
    first, second, _ = pad([basis, basis.clone(), core], [torch.empty(6, 5), torch.empty(6, 6), torch.empty(5, 6)], {2})
    for factor in (first, second):
        np.testing.assert_allclose(factor.T @ factor, np.eye(factor.shape[1]), atol=1e-12)


def test_more_columns_than_rows_are_finite_directions_of_the_same_length():
    basis = 3 * torch.linalg.qr(draw((3, 3))).Q
    (padded, _) = pad([basis, draw((5, 3))], [torch.empty(3, 7), torch.empty(5, 7)], {1})
    np.testing.assert_allclose(padded.norm(dim=0), 3 * np.ones(7), atol=1e-12)
