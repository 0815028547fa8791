"""The second stage: crops, a round against a slow reference, and when rounds end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from simulated_maps import simulate
from tensor_dropout_lab.labelling import refinement
from tensor_dropout_lab.labelling.map_store import MapStore, pooled_grid
from tensor_dropout_lab.labelling.refinement import fit_refinement, fit_round, mean_distance, read_crops


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_crop_is_what_lies_around_its_point():
    maps = torch.randn(5, 8, 10, 3, generator=torch.Generator().manual_seed(0))
    points = torch.tensor([[[3.5 / 10, 4.5 / 8]], [[6.5 / 10, 2.5 / 8]]])  # centers of the cells (4, 3) and (2, 6)
    crops = read_crops(maps, torch.tensor([4, 1]), points, side=3).view(2, 3, 3, 3)
    assert torch.allclose(crops[0], maps[4, 3:6, 2:5].movedim(-1, 0), atol=1e-5)
    assert torch.allclose(crops[1], maps[1, 1:4, 5:8].movedim(-1, 0), atol=1e-5)


@pytest.mark.parametrize("side", [1, 4, 5])
def test_crops_are_those_of_torch_between_cells_and_outside(side):
    generator = torch.Generator().manual_seed(1)
    maps = torch.randn(3, 8, 10, 2, generator=generator).half()
    points = 3 * torch.rand(3, 40, 2, generator=generator) - 1
    steps = 2 * (torch.arange(side) - (side - 1) / 2)
    x = (2 * points[..., 0, None] - 1 + steps / 10)[..., None, :].expand(3, 40, side, side)
    y = (2 * points[..., 1, None] - 1 + steps / 8)[..., :, None].expand(3, 40, side, side)
    grid = torch.stack([x, y], -1).view(3, 40 * side, side, 2)
    sampled = F.grid_sample(maps.float().movedim(-1, 1), grid, padding_mode="border", align_corners=False)
    expected = sampled.view(3, 2, 40, side * side).movedim(2, 1).flatten(2)
    assert torch.allclose(read_crops(maps, torch.arange(3), points, side), expected, atol=1e-4)


@pytest.fixture(scope="module")
def problem():
    """Crops and offsets of 30 images with three points, two copies each; 8 features suffice for them."""
    generator = torch.Generator().manual_seed(1)
    crops = torch.randn(60, 3, 8, generator=generator)
    weight = torch.randn(3, 8, 2, generator=generator)
    offsets = torch.einsum("npd,pdo->npo", crops, weight) + 0.3 * torch.randn(60, 3, 2, generator=generator)
    return crops, 0.01 * offsets, torch.arange(60) % 30 % 5


def solve_slowly(z: np.ndarray, y: np.ndarray, ridge: float) -> np.ndarray:
    """min ‖z w - y‖² + ridge ‖w without the constant‖², by stacked rows."""
    K = z.shape[1]
    penalty = np.sqrt(ridge) * np.diag([1.0] * (K - 1) + [1e-3])
    return np.linalg.lstsq(np.vstack([z, penalty]), np.vstack([y, np.zeros((K, 2))]), rcond=None)[0]


def test_a_round_is_ridge_for_each_point_on_shared_axes(problem):
    crops, offsets, folds = problem
    found, axes, held = fit_round(crops, offsets, folds, 30, (1e-3,), seed=0)
    z = axes.project(crops).double().numpy()
    corrected = found.correct(crops, torch.zeros(60, 3, 2))
    for point in range(3):
        own, y = z[:, point], offsets[:, point].double().numpy()
        ridge = 1e-3 * np.square(own[:, :-1]).sum()
        limit = np.abs(y).max(0)
        expected = np.clip(own @ solve_slowly(own, y, ridge), -limit, limit)
        assert np.allclose(corrected[:, point], expected, atol=1e-5)
        for fold in range(5):  # and held-out corrections come from fits that had not seen the fold
            seen = (folds != fold).numpy()
            w = solve_slowly(own[seen], y[seen], seen.mean() * ridge)
            rows = np.flatnonzero(~seen[:30])
            assert np.allclose(held[rows, point], np.clip(own[rows] @ w, -limit, limit), atol=1e-5)


def test_points_that_are_unknown_do_not_count(problem):
    crops, offsets, folds = problem
    missing = offsets.clone()
    missing[[4, 34], 1] = torch.nan
    other = crops.clone()
    other[34, 1] = 50.0  # not read: the axes come from the first thirty
    some, _, _ = fit_round(crops, missing, folds, 30, (1e-3,), seed=0)
    same, _, _ = fit_round(other, missing, folds, 30, (1e-3,), seed=0)
    assert torch.allclose(some.weight[1], same.weight[1], rtol=1e-3, atol=1e-6)
    assert not torch.allclose(some.weight[1], fit_round(crops, offsets, folds, 30, (1e-3,), 0)[0].weight[1], rtol=1e-3)


def test_no_correction_is_larger_than_those_it_was_trained_on(problem):
    crops, offsets, folds = problem
    found, _, _ = fit_round(crops, offsets, folds, 30, (1e-3,), seed=0)
    far = found.correct(1000 * crops, torch.zeros(60, 3, 2))
    assert bool((far.abs() <= offsets.abs().amax(0) + 1e-7).all())


def test_the_penalty_with_the_lowest_held_out_error_is_taken(problem):
    crops, offsets, folds = problem
    alone = {}
    for penalty in (1e-6, 1e-2, 1.0):
        _, _, held = fit_round(crops, offsets, folds, 30, (penalty,), seed=0)
        alone[penalty] = mean_distance(held, offsets[:30])
    assert fit_round(crops, offsets, folds, 30, tuple(alone), seed=0)[0].penalty == min(alone, key=alone.get)


@pytest.fixture(scope="module")
def images():
    coarse, fine, points = simulate(60)
    store = MapStore(60)
    store.add(np.arange(60), coarse, fine)
    rng = np.random.default_rng(0)
    start = points + rng.normal(0, 0.03, points.shape)
    return store, torch.from_numpy(points).float(), torch.from_numpy(start).float()


def test_rounds_bring_points_nearer_and_held_out_errors_say_how_much(images):
    store, truth, start = images
    rows, folds = np.arange(40), np.arange(40) % 5
    found = fit_refinement(store.read, rows, truth[:40], start[:40], folds)
    assert found.rounds
    new = found.refine(store.read, np.arange(40, 60), start[40:])
    assert mean_distance(new, truth[40:]) < 0.4 * mean_distance(start[40:], truth[40:])
    assert mean_distance(found.held, truth[:40]) == pytest.approx(mean_distance(new, truth[40:]), rel=0.4)


def test_where_maps_say_nothing_no_round_is_kept(images):
    _, truth, start = images
    generator = torch.Generator().manual_seed(0)

    def read(rows, points):
        return torch.randn(*points.shape[:2], 20, generator=generator)

    found = fit_refinement(read, np.arange(40), truth[:40], start[:40], np.arange(40) % 5)
    assert found.rounds == ()
    assert torch.equal(found.held, start[:40])


def test_too_few_images_or_folds_are_left_as_they_are(images):
    store, truth, start = images
    for rows, folds in ((np.arange(4), np.arange(4)), (np.arange(20), np.zeros(20, int))):
        assert fit_refinement(store.read, rows, truth[rows], start[rows], folds).rounds == ()


def test_moved_positions_are_as_far_off_as_held_out_ones():
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(4000, 2, 2, generator=generator)
    errors = torch.randn(4000, 2, 2, generator=generator) @ torch.tensor([[0.03, 0.02], [0.0, 0.01]])
    truth[7, 1] = torch.nan
    held = truth + errors
    held[7, 1] = 0.5
    moved = refinement._move(truth, held, generator)
    known = ~truth.isnan().any(-1)
    for point in range(2):
        rows = known[:, point]
        got = torch.cov((moved - truth)[rows, point].mT)
        assert torch.allclose(got, torch.cov(errors[rows, point].mT), rtol=0.1, atol=3e-5)
    assert moved[7, 1].tolist() == [0.5, 0.5]


# The maps.


def test_reduced_channels_keep_what_varies():
    """Of 60 channels that are mixtures of 5, the 48 that are kept tell all."""
    rng = np.random.default_rng(0)
    sources, mixing = rng.normal(size=(40, 5, 9, 9)), rng.normal(size=(5, 60))
    maps = np.einsum("nkhw,kc->nchw", sources, mixing).astype(np.float32)
    store = MapStore(40)
    store.add(np.arange(20), maps[:20], None)
    assert store.levels[0].maps is None  # twenty are not enough to decide how
    store.add(np.arange(20, 40), maps[20:], None)
    kept = store.levels[0].maps.float().flatten(0, -2).numpy()
    flat = np.moveaxis(maps, 1, -1).reshape(-1, 60)
    assert kept.shape == (len(flat), 48)
    rest = (
        flat - np.c_[kept, np.ones(len(kept))] @ np.linalg.lstsq(np.c_[kept, np.ones(len(kept))], flat, rcond=None)[0]
    )
    assert np.abs(rest).max() < 0.02 * np.abs(flat).max()


def test_the_first_stage_sees_means(images):
    coarse = simulate(60)[0]
    store = images[0]
    means = coarse[:3].astype(np.float32).reshape(3, 6, 6, 2, 6, 2).mean((3, 5))
    assert np.allclose(store.take(np.arange(3)), means, atol=2e-3)
    assert pooled_grid((28, 56)) == (7, 8)
    assert store.read(np.arange(3), torch.full((3, 4, 2), 0.5)).shape == (3, 4, 25 * (6 + 6))
