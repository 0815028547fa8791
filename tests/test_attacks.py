"""The attacks against two published libraries, against closed forms, and against what no attack may ever do."""

from __future__ import annotations

import math
from contextlib import contextmanager
from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import tensor_dropout as td
from robust_models import (
    Detached,
    Noisy,
    Rounded,
    Scaled,
    find_accuracy,
    load_digits,
    train_mlp,
    train_plain,
    train_regression,
    train_robust,
    train_tensor,
)
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.robustness import (
    APGD,
    LOSSES,
    Iterated,
    Loss,
    RandomSearch,
    Square,
    Target,
    Transfer,
    apgd,
    bim,
    fgsm,
    paper_attack,
    pgd,
)
from tensor_dropout.robustness.blackbox import _window_side
from tensor_dropout.robustness.norms import NORMS, find_norm
from tensor_dropout_lab.evaluation.twin import fit_twin

BALLS = {"linf": 0.1, "l2": 0.6}
"""Norm -> a radius at which the plain networks lose about half of the digits."""

both_norms = pytest.mark.parametrize("norm", list(BALLS))
repeatable = settings(
    derandomize=True, deadline=None, max_examples=50, database=None, suppress_health_check=list(HealthCheck)
)


class Everyone(Target):
    """A target that calls itself random, so that nobody leaves: every example runs to the end."""

    def is_randomized(self, x):
        return True


class Affine(nn.Module):
    """(x - shift) / scale, in front of a network."""

    def __init__(self, shift, scale):
        super().__init__()
        self.shift, self.scale = shift, scale

    def forward(self, x):
        return (x - self.shift) / self.scale


def measure(norm, difference):
    """The norm of every example, written out."""
    difference = difference.double().flatten(1)
    return difference.abs().amax(1) if norm == "linf" else difference.square().sum(1).sqrt()


def is_fooled(target, x, y):
    return target.predict(x).output.argmax(1) != y


def draw_start(norm, x, epsilon, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return find_norm(norm).draw_far(x, epsilon, generator).clamp(0, 1)


def make_linear(outputs=1, size=(1, 4, 4), seed=0):
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(size), outputs))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return net


# Foolbox


@pytest.fixture(scope="module")
def foolbox():
    return pytest.importorskip("foolbox", reason="Foolbox is not installed")


FAST = {"linf": "LinfFastGradientAttack", "l2": "L2FastGradientAttack"}
BASIC = {"linf": "LinfBasicIterativeAttack", "l2": "L2BasicIterativeAttack"}
PROJECTED = {"linf": "LinfProjectedGradientDescentAttack", "l2": "L2ProjectedGradientDescentAttack"}
RANGES = {"unit": (0.0, 1.0), "pixels": (0.0, 255.0), "around-zero": (-1.5, 0.5)}


def prepare_case(foolbox, make, bounds, dtype):
    """Their model and our target for the same network on images within the bounds, and how wide these are."""
    (x, y), net, width = load_digits(), make().to(dtype), bounds[1] - bounds[0]
    # Numbers of ours that no 16th is: on a grid, clipping would hide small differences.
    x = (0.95 * x + 0.02 * torch.rand(x.shape, generator=torch.Generator().manual_seed(0)))[:100].to(dtype)
    prepare = Affine(bounds[0], width)
    theirs = foolbox.PyTorchModel(nn.Sequential(prepare, net).eval(), bounds=bounds, device="cpu")
    return theirs, Target(net, bounds=bounds, prepare=prepare), (bounds[0] + width * x).clamp(*bounds), y[:100], width


def record_start(attack_class):
    """Their attack, keeping the random start that it draws."""

    class Recording(attack_class):
        def get_random_start(self, x0, epsilon):
            self.start = super().get_random_start(x0, epsilon)
            return self.start

    return Recording


@both_norms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("bounds", RANGES.values(), ids=RANGES.keys())
def test_fgsm_is_foolboxs_bit_for_bit(foolbox, bounds, dtype, norm):
    theirs, target, x, y, width = prepare_case(foolbox, train_mlp, bounds, dtype)
    attack = getattr(foolbox.attacks, FAST[norm])()
    for epsilon in (0.01, BALLS[norm], 4.0):
        expected = attack.run(theirs, x, y, epsilon=epsilon * width)
        assert torch.equal(fgsm(epsilon * width, norm=norm)(target, x, y), expected)


@both_norms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("bounds", RANGES.values(), ids=RANGES.keys())
def test_bim_is_foolboxs_bit_for_bit(foolbox, bounds, dtype, norm):
    theirs, target, x, y, width = prepare_case(foolbox, train_plain, bounds, dtype)
    radius = BALLS[norm] * width
    for epsilon, steps, share in ((0.3 * radius, 1, 0.5), (radius, 7, 0.2), (2 * radius, 20, 0.1)):
        relative = getattr(foolbox.attacks, BASIC[norm])(rel_stepsize=share, steps=steps)
        expected = relative.run(theirs, x, y, epsilon=epsilon)
        assert torch.equal(bim(epsilon, steps=steps, step=share * epsilon, norm=norm)(target, x, y), expected)
    absolute = getattr(foolbox.attacks, BASIC[norm])(abs_stepsize=0.013 * width, steps=11)
    expected = absolute.run(theirs, x, y, epsilon=radius)
    assert torch.equal(bim(radius, steps=11, step=0.013 * width, norm=norm)(target, x, y), expected)


@both_norms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("bounds", RANGES.values(), ids=RANGES.keys())
def test_pgd_is_foolboxs_bit_for_bit_from_the_same_start(foolbox, bounds, dtype, norm):
    theirs, target, x, y, width = prepare_case(foolbox, train_plain, bounds, dtype)
    for epsilon, steps, share in ((0.05 * width, 10, 0.2), (BALLS[norm] * width, 20, 1 / 40)):
        attack = record_start(getattr(foolbox.attacks, PROJECTED[norm]))(rel_stepsize=share, steps=steps)
        expected = attack.run(theirs, x, y, epsilon=epsilon)
        ours = pgd(epsilon, steps=steps, step=share * epsilon, norm=norm, keep="last")
        start = attack.start.raw.clamp(*bounds)
        assert torch.equal(ours(target, x, y, start=start), expected)


@both_norms
@pytest.mark.parametrize("bounds", RANGES.values(), ids=RANGES.keys())
def test_targeted_steps_are_foolboxs_bit_for_bit(foolbox, bounds, norm):
    theirs, target, x, y, width = prepare_case(foolbox, train_mlp, bounds, torch.float32)
    goal, epsilon = (y + 3) % 10, BALLS[norm] * width
    criterion = foolbox.criteria.TargetedMisclassification(goal)
    basic = getattr(foolbox.attacks, BASIC[norm])(rel_stepsize=0.2, steps=10)
    ours = bim(epsilon, steps=10, step=0.2 * epsilon, norm=norm, loss="targeted_cross_entropy")
    expected = basic.run(theirs, x, criterion, epsilon=epsilon)
    assert torch.equal(ours(target, x, y, goal=goal), expected)
    reached = (target.predict(expected).output.argmax(1) == goal).float().mean()
    assert reached > (target.predict(x).output.argmax(1) == goal).float().mean() + 0.1

    projected = record_start(getattr(foolbox.attacks, PROJECTED[norm]))(rel_stepsize=0.1, steps=10)
    expected = projected.run(theirs, x, criterion, epsilon=epsilon)
    ours = pgd(epsilon, steps=10, step=0.1 * epsilon, norm=norm, loss="targeted_cross_entropy", keep="last")
    assert torch.equal(ours(target, x, y, goal=goal, start=projected.start.raw.clamp(*bounds)), expected)


def test_a_tensor_network_is_attacked_as_foolbox_attacks_it(foolbox):
    theirs, target, x, y, _ = prepare_case(foolbox, train_tensor, (0.0, 1.0), torch.float32)
    attack = foolbox.attacks.LinfBasicIterativeAttack(rel_stepsize=0.2, steps=10)
    assert torch.equal(bim(0.1, steps=10, step=0.2 * 0.1)(target, x, y), attack.run(theirs, x, y, epsilon=0.1))


# The paper's schedule


@pytest.mark.parametrize("unit", [1 / 255, 1e-3])
def test_the_papers_strengths_steps_and_step_size(unit):
    for strength in range(1, 129):
        steps = -(-min(4 * strength + 16, 5 * strength) // 4)  # ceil(min(λ + 4, 1.25 λ)) in whole numbers
        for name in ("bim", "pgd"):
            attack = paper_attack(name, strength, unit)
            assert attack.steps == steps
            assert attack.step == unit
            assert attack.epsilon == pytest.approx(strength * unit, rel=1e-12)
            assert (attack.norm, attack.loss, attack.keep, attack.restarts) == ("linf", "cross_entropy", "last", 1)
        single = paper_attack("fgsm", strength, unit)
        assert (single.steps, single.step) == (1, single.epsilon)
    for strength, steps in {1: 2, 2: 3, 4: 5, 8: 10, 15: 19, 16: 20, 17: 21, 32: 36, 128: 132}.items():
        assert paper_attack("bim", strength, unit).steps == steps
    assert (paper_attack("bim", 2, unit).start, paper_attack("pgd", 2, unit).start) == ("centre", "random")


def test_a_strength_between_whole_numbers_and_an_attack_that_the_paper_lacks():
    assert paper_attack("bim", 0.5, 1 / 255).steps == 1
    assert paper_attack("pgd", 2.5, 1 / 255).steps == 4
    with pytest.raises(TensorDropoutError, match="the paper has fgsm, bim and pgd"):
        paper_attack("cw", 2, 1 / 255)


# torchattacks' APGD


@pytest.fixture(scope="module")
def torchattacks():
    return pytest.importorskip("torchattacks", reason="torchattacks is not installed")


THEIR_LOSS = {"cross_entropy": "ce", "dlr": "dlr"}
THEIR_NORM = {"linf": "Linf", "l2": "L2"}


@contextmanager
def doubles():
    """torchattacks keeps its losses in the default type."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def correct(attack_class, find_loss, first):
    """Their attack, but its first comparison is with the loss at the start, as Croce & Hein (2020) have it.

    They read the loss before the first step at the index -1: the last step's entry, which is 0 then. The same seed is
    set for every run, so that all classes are tried from one start; ``seen`` has the first two inputs of the last run,
    with their logits, of which number ``first`` is the start.
    """

    class Corrected(attack_class):
        seen, labels = [], []  # shared with nobody: there is one class per attack

        def attack_single_run(self, x_in, y_in):
            self.seen.clear()
            self.labels[:] = [y_in]
            torch.manual_seed(self.seed)
            return super().attack_single_run(x_in, y_in)

        def get_logits(self, inputs, *args, **kwargs):
            logits = super().get_logits(inputs, *args, **kwargs)
            if len(self.seen) < 2:
                self.seen.append((inputs.detach().clone(), logits.detach()))
            return logits

        def find_start(self):
            return self.seen[first][0]

        def check_oscillation(self, x, j, k, y5, k3=0.75):
            at_start = find_loss(self, self.seen[first][1], self.labels[0])
            before = np.concatenate([at_start[None].numpy(), x])  # before[i]: before step i
            rises = (x[j - k + 1 : j + 1] > before[j - k + 1 : j + 1]).sum(0)
            return rises <= k * k3

    return Corrected


def make_theirs(torchattacks, net, loss, norm, **options):
    """The corrected APGD: it looks at the start first."""

    def find_loss(attack, logits, y):
        return attack.dlr_loss(logits, y) if loss == "dlr" else F.cross_entropy(logits, y, reduction="none")

    made = correct(torchattacks.APGD, find_loss, first=0)
    return made(net, norm=THEIR_NORM[norm], loss=THEIR_LOSS[loss], **options)


def make_their_targeted(torchattacks, net, norm, **options):
    """The corrected targeted APGD: it looks at the clean input first, then at the start."""

    def find_loss(attack, logits, y):
        goal = attack.seen[0][1].sort(dim=1)[1][:, -attack.target_class]
        return attack.dlr_loss_targeted(logits, y, goal)

    return correct(torchattacks.APGDT, find_loss, first=1)(net, norm=THEIR_NORM[norm], **options)


@both_norms
@pytest.mark.parametrize("loss", ["cross_entropy", "dlr"])
@pytest.mark.parametrize(("make", "steps"), [(train_mlp, 7), (train_mlp, 50), (train_plain, 20), (train_robust, 12)])
def test_apgd_is_the_published_one(torchattacks, make, steps, loss, norm):
    (x, y), net = load_digits(), make().double()
    x, y, epsilon = x[:60].double(), y[:60], BALLS[norm]
    theirs = make_theirs(torchattacks, net, loss, norm, eps=epsilon, steps=steps, seed=steps)
    with doubles():
        best, standing, best_loss, _ = theirs.attack_single_run(x, y)
    attack = APGD(epsilon, steps=steps, norm=norm, loss=loss)

    # Fooled examples leave: those that never do have gone the whole way in both.
    target = Target(net)
    ours = attack(target, x, y, start=theirs.find_start())
    assert torch.equal(is_fooled(target, ours, y), ~standing)
    assert 5 < standing.sum() < 56
    torch.testing.assert_close(LOSSES[loss](net(ours), y)[standing], best_loss[standing], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours[standing], best[standing], rtol=0, atol=1e-6)

    # Nobody leaves. DLR grows without bound where the three largest logits meet, behind the decision boundary: there
    # l2 steps amplify the last digit, so that only its cross-entropy can be compared.
    everyone = attack(Everyone(net), x, y, start=theirs.find_start())
    compared = torch.ones_like(standing) if loss == "cross_entropy" else standing
    torch.testing.assert_close(LOSSES[loss](net(everyone), y)[compared], best_loss[compared], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(everyone[compared], best[compared], rtol=0, atol=1e-6)


@both_norms
def test_targeted_apgd_is_the_published_one(torchattacks, norm):
    """One example at a time: for l2 their step size is that of the first example, for all."""
    (x, y), net, epsilon = load_digits(), train_mlp().double(), BALLS[norm]
    target = Target(net)
    rows = (~is_fooled(target, x.double(), y)).nonzero()[:12, 0]  # they leave the others out
    x, y = x[rows].double(), y[rows]
    standing, first, first_loss, starts = [], [], [], []
    for image, label in zip(x.split(1), y.split(1), strict=True):
        theirs = make_their_targeted(torchattacks, net, norm, eps=epsilon, steps=12, seed=len(starts), n_classes=10)
        with doubles():
            standing.append(theirs.perturb(image, label)[0])
            theirs.target_class = 2  # the likeliest wrong one alone
            best, _, best_loss, _ = theirs.attack_single_run(image, label)
        first.append(best)
        first_loss.append(best_loss)
        starts.append(theirs.find_start())
    standing, start = torch.cat(standing), torch.cat(starts)
    attack = partial(APGD, epsilon, steps=12, norm=norm, loss="targeted_dlr")
    assert torch.equal(is_fooled(target, attack()(target, x, y, start=start), y), ~standing)
    assert 0 < standing.sum() < 12

    ours = attack(goals=1)(Everyone(net), x, y, start=start)
    goal = net(x).scatter(1, y[:, None], -torch.inf).argmax(1)
    loss = LOSSES["targeted_dlr"](net(ours), y, goal)
    torch.testing.assert_close(loss[standing], torch.cat(first_loss)[standing], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours[standing], torch.cat(first)[standing], rtol=0, atol=1e-6)


@both_norms
@pytest.mark.parametrize("loss", ["cross_entropy", "dlr"])
@pytest.mark.parametrize("make", [train_mlp, train_robust])
def test_apgd_is_within_2_points_of_the_library_as_it_is(torchattacks, make, loss, norm):
    (x, y), net = load_digits(), make()
    theirs = torchattacks.APGD(net, norm=THEIR_NORM[norm], loss=THEIR_LOSS[loss], eps=BALLS[norm], steps=20)
    target = Target(net, batch=512)
    ours = APGD(BALLS[norm], steps=20, norm=norm, loss=loss)(target, x, y)
    assert find_accuracy(target, ours, y) == pytest.approx(find_accuracy(target, theirs(x, y), y), abs=0.02)


def test_targeted_apgd_is_within_2_points_of_the_library_as_it_is(torchattacks):
    (x, y), net = load_digits(), train_plain()
    target = Target(net, batch=512)
    theirs = torchattacks.APGDT(net, norm="Linf", eps=0.1, steps=6, n_classes=10)(x, y)
    ours = APGD(0.1, steps=6, loss="targeted_dlr")(target, x, y)
    assert find_accuracy(target, ours, y) == pytest.approx(find_accuracy(target, theirs, y), abs=0.02)


def watch_checkpoints(monkeypatch, steps):
    """The numbers of the steps after which a run of APGD looks at its step sizes."""
    seen, count = [], [0]

    def update(*args):
        count[0] += 1
        original_update(*args)

    def halve(*args):
        seen.append(count[0])
        original_halve(*args)

    original_update, original_halve = apgd._update, apgd._halve
    monkeypatch.setattr(apgd, "_update", update)
    monkeypatch.setattr(apgd, "_halve", halve)
    x = torch.rand(2, 1, 4, 4)
    APGD(0.1, steps=steps, loss="increase")(Target(make_linear(), task="regression"), x, torch.zeros(2))
    assert count[0] == steps
    return seen


@pytest.mark.parametrize("steps", [1, 2, 5, 10, 20, 33, 50, 75, 100, 200, 300])
def test_checkpoints_follow_the_published_recursion(monkeypatch, steps):
    # p_0 = 0, p_1 = 0.22, p_(j+1) = p_j + max(p_j - p_(j-1) - 0.03, 0.06), a checkpoint after ceil(p_j N) steps.
    shares = [0, 22]
    while shares[-1] <= 100:
        shares.append(shares[-1] + max(shares[-1] - shares[-2] - 3, 6))  # per cent
    published = [math.ceil(share * steps / 100) for share in shares[1:] if share <= 100]
    seen = watch_checkpoints(monkeypatch, steps)
    if steps % 100 == 0:
        assert seen == published
    assert all(a < b for a, b in pairwise(seen))
    # Otherwise windows are whole numbers, as in the published code: each is rounded down, and at least 1.
    window, expected = max(22 * steps // 100, 1), []
    while sum(expected) + window <= steps:
        expected.append(window)
        window = max(window - max(3 * steps // 100, 1), max(6 * steps // 100, 1))
    assert seen == np.cumsum(expected).tolist()


# What no attack may do


def make_small_net(size, outputs, seed, dtype):
    """All that an attack could leave changed: batch norm, dropout, tensor dropout, frozen weights."""
    torch.manual_seed(seed)
    features = math.prod(size)
    head = td.CPRegression((2, 3), outputs, rank=2, dropout=0.7, init="normal")
    layers = [nn.Flatten(), nn.Linear(features, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 6)]
    net = nn.Sequential(*layers, nn.Unflatten(1, (2, 3)), head)
    net.train()
    net[2].eval()
    net[1].bias.requires_grad_(False)
    net[2].running_mean.normal_()
    return net.to(dtype)


def describe_state(net):
    return {
        "parameters": {name: tensor.clone() for name, tensor in net.state_dict().items()},
        "learning": {name: (p.requires_grad, p.grad) for name, p in net.named_parameters()},
        "modes": {name: module.training for name, module in net.named_modules()},
        "at_test": [m.at_test for m in net.modules() if isinstance(m, td.TensorDropout)],
        "hooks": [len(m._forward_hooks) for m in net.modules()],
        "random": torch.get_rng_state(),
    }


def assert_same_state(before, after):
    torch.testing.assert_close(before.pop("parameters"), after.pop("parameters"), rtol=0, atol=0)
    assert torch.equal(before.pop("random"), after.pop("random"))
    assert before == after


def assert_within(worst, x, norm, epsilon, bounds):
    assert (worst.shape, worst.dtype) == (x.shape, x.dtype)
    assert bool(worst.isfinite().all())
    ulps = 4 * torch.finfo(x.dtype).eps * float(x.abs().max() + epsilon)
    slack = ulps * (1 if norm == "linf" else x[0].numel() ** 0.5)
    assert float(measure(norm, worst.double() - x.double()).max()) <= epsilon * (1 + 1e-6) + slack
    limits = torch.tensor(bounds, dtype=x.dtype)
    assert bool((worst >= limits[0]).all())
    assert bool((worst <= limits[1]).all())


CLASSIFYING = ["cross_entropy", "margin", "dlr"]
REGRESSING = ["absolute", "increase", "decrease"]


@st.composite
def attacks(draw, task):
    """(attack, norm, extra arguments of the call), of every kind."""
    norm, seed = draw(st.sampled_from(list(NORMS))), draw(st.integers(0, 99))
    epsilon = draw(st.sampled_from([1e-6, 0.03, 0.3, 1.0, 25.0]) | st.floats(1e-4, 2.0))
    loss = draw(st.sampled_from(CLASSIFYING if task == "classification" else REGRESSING))
    steps = draw(st.integers(1, 6))
    ways = ["fgsm", "bim", "bim-best", "pgd", "pgd-last", "apgd", "square", "random", "transfer"]
    if task == "classification":
        ways += ["apgd-targeted_dlr", "apgd-targeted_cross_entropy", "apgd-targeted_margin"]
    way = draw(st.sampled_from(ways))
    if way == "fgsm":
        return fgsm(epsilon, norm=norm, loss=loss), norm
    if way.startswith("bim"):
        step = draw(st.none() | st.sampled_from([0.01, 3.0]))
        keep = "best" if way.endswith("best") else "last"
        return bim(epsilon, steps=steps, step=step, norm=norm, loss=loss, keep=keep), norm
    if way == "pgd":
        restarts = draw(st.integers(1, 3))
        return pgd(epsilon, steps=steps, restarts=restarts, norm=norm, loss=loss, seed=seed), norm
    if way == "pgd-last":
        return pgd(epsilon, steps=steps, norm=norm, loss=loss, keep="last", seed=seed), norm
    if way.startswith("apgd"):
        goals, loss = draw(st.integers(1, 9)), way.partition("-")[2] or loss
        restarts = draw(st.integers(1, 2))
        return APGD(epsilon, steps=steps, norm=norm, loss=loss, restarts=restarts, goals=goals, seed=seed), norm
    if way == "square":
        return Square(epsilon, queries=3 * steps, share=draw(st.sampled_from([0.1, 0.8, 1.0])), seed=seed), "linf"
    if way == "random":
        return RandomSearch(epsilon, queries=steps, norm=norm, seed=seed), norm
    return Transfer(draw(st.just(pgd(epsilon, steps=steps, norm=norm, loss=loss, seed=seed))), None), norm


@repeatable
@given(data=st.data())
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_within_the_ball_and_the_bounds_and_nothing_else_is_changed(task, data):
    attack, norm = data.draw(attacks(task))
    size = data.draw(st.sampled_from([(1, 6), (2, 5), (1, 4, 4), (3, 3, 5), (1, 2, 3, 4)]))
    bounds = data.draw(st.sampled_from([(0.0, 1.0), (-1.0, 2.0), (0.0, 255.0), (0.1, 0.7), (-math.inf, math.inf)]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    outputs = data.draw(st.integers(4, 6)) if task == "classification" else data.draw(st.integers(1, 3))
    seed, batch = data.draw(st.integers(0, 99)), data.draw(st.sampled_from([3, 64]))
    net = make_small_net(size, outputs, seed, dtype)
    low, high = (max(bounds[0], -50.0), min(bounds[1], 50.0))
    x = low + (high - low) * torch.rand(7, *size, dtype=dtype)
    x[0], x[1] = low, high  # at the edges
    y = torch.randint(outputs, (7,)) if task == "classification" else torch.randn(7, outputs, dtype=dtype)
    target = Target(net, bounds=bounds, task=task, batch=batch)
    if isinstance(attack, Transfer):
        attack = Transfer(
            attack.attack, Target(make_small_net(size, outputs, seed + 1, dtype), bounds=bounds, task=task)
        )
    before, kept = describe_state(net), (x.clone(), y.clone())
    worst = attack(target, x, y)
    assert_same_state(before, describe_state(net))
    assert torch.equal(x, kept[0])
    assert torch.equal(y, kept[1])
    assert worst.data_ptr() != x.data_ptr()
    assert not worst.requires_grad
    assert_within(worst, x, norm, attack.epsilon, bounds)
    torch.manual_seed(seed + 1)  # other random numbers in the program, the same attack
    torch.rand(3)
    assert torch.equal(attack(target, x, y), worst)


EVERY_ATTACK = {
    "fgsm": fgsm(0.1),
    "fgm": fgsm(0.6, norm="l2"),
    "bim": bim(0.1),
    "bim-best": bim(0.6, norm="l2", keep="best"),
    "pgd": pgd(0.1, steps=5, restarts=2),
    "pgd-last": pgd(0.6, steps=5, norm="l2", keep="last"),
    "apgd": APGD(0.1, steps=5),
    "apgd-l2": APGD(0.6, steps=5, norm="l2", loss="dlr"),
    "apgd-targeted": APGD(0.1, steps=5, loss="targeted_dlr", goals=2),
    "square": Square(0.1, queries=10),
    "random": RandomSearch(0.1, queries=5),
    "random-l2": RandomSearch(0.6, queries=5, norm="l2"),
    "transfer": Transfer(pgd(0.1, steps=5), Target(make_linear(10, (1, 8, 8)))),
}
every_attack = pytest.mark.parametrize("attack", EVERY_ATTACK.values(), ids=EVERY_ATTACK.keys())


@every_attack
def test_digits_stay_within_the_ball_and_the_bounds(attack):
    (x, y), target = load_digits(), Target(train_tensor(), batch=100)
    x, y = x[:80], y[:80]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    worst = attack(target, x, y)
    assert torch.equal(torch.get_rng_state(), before)
    norm = getattr(attack, "norm", "linf")
    assert_within(worst, x, norm, attack.epsilon, (0.0, 1.0))
    assert find_accuracy(target, worst, y) <= find_accuracy(target, x, y)


@every_attack
def test_other_seeds_are_other_attacks_and_names_are_for_records(attack):
    assert attack.name
    assert attack.epsilon > 0
    if getattr(attack, "start", "random") == "centre" or isinstance(attack, Transfer):
        return  # nothing is drawn
    x, y = (part[:20] for part in load_digits())
    other = type(attack)(**{**vars(attack), "seed": 77})
    target = Target(train_robust())
    assert not torch.equal(attack(target, x, y), other(target, x, y))


@every_attack
def test_inputs_that_need_a_gradient_bring_none_into_the_result(attack):
    (x, y), target = load_digits(), Target(train_plain())
    x, y = x[:20].clone().requires_grad_(), y[:20]
    worst = attack(target, x, y)
    assert not worst.requires_grad
    assert x.grad is None


@every_attack
def test_attacks_run_where_gradients_are_off(attack):
    (x, y), target = load_digits(), Target(train_plain())
    expected = attack(target, x[:20], y[:20])
    with torch.no_grad():
        assert torch.equal(attack(target, x[:20], y[:20]), expected)


@every_attack
def test_examples_that_are_all_wrong_already(attack):
    x, _ = load_digits()
    x, target = x[:20], Target(train_plain())
    y = (target.predict(x).output.argmax(1) + 5) % 10
    worst = attack(target, x, y)
    assert_within(worst, x, getattr(attack, "norm", "linf"), attack.epsilon, (0.0, 1.0))
    assert find_accuracy(target, worst, y) <= 0.1


@both_norms
@pytest.mark.parametrize("make", [partial(pgd, steps=3), partial(APGD, steps=3)], ids=["pgd", "apgd"])
def test_restarts_when_nobody_is_left(make, norm):
    x, _ = load_digits()
    x, target = x[:20], Target(train_plain())
    y = (target.predict(x).output.argmax(1) + 5) % 10
    assert is_fooled(target, make(0.01, norm=norm, restarts=3)(target, x, y), y).all()


@every_attack
def test_one_example(attack):
    x, y = load_digits()
    assert attack(Target(train_plain()), x[:1], y[:1]).shape == (1, 1, 8, 8)


@pytest.mark.parametrize("kind", [Rounded, Detached, nn.Sequential])
def test_no_attack_repairs_what_was_wrong(kind):
    """Robust accuracy above the clean one would be absurd: the clean input is in every ball."""
    (x, y), target = load_digits(), Target(kind(train_plain(1)), batch=512)
    wrong = is_fooled(target, x, y)
    assert wrong.any()
    for epsilon in (0.02, 0.2):
        for attack in (
            pgd(epsilon, steps=2, seed=1),
            bim(epsilon, steps=2, keep="best"),
            APGD(epsilon, steps=2, seed=1),
            APGD(epsilon, steps=2, loss="targeted_dlr", goals=1, seed=1),
            Square(epsilon, queries=5, seed=1),
            RandomSearch(epsilon, queries=2, seed=1),
            Transfer(pgd(epsilon, steps=2, seed=1), Target(train_mlp())),
        ):
            assert is_fooled(target, attack(target, x, y), y)[wrong].all(), attack


def test_a_start_does_not_repair_what_was_wrong():
    """The clean input is wrong by a little, the start is right: the first is the worst point of the ball."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, 4))
        net[1].bias.copy_(torch.tensor([-2.05, 2.05]))
    target, x, y = Target(net), torch.full((1, 1, 2, 2), 0.5), torch.tensor([0])
    assert is_fooled(target, x, y).all()
    worst = bim(0.1, steps=1, step=0.01, keep="best")(target, x, y, start=x + 0.1)
    assert is_fooled(target, worst, y).all()


@pytest.mark.parametrize("make", [pgd, APGD])
@pytest.mark.parametrize("limits", ["ball", "bounds"])
def test_a_start_that_is_not_allowed_widens_nothing(limits, make):
    """The start is the worst of all points here: it would be kept."""
    net, x = make_linear(), torch.full((5, 1, 4, 4), 0.95)
    best = x + (0.4 if limits == "ball" else 0.1) * net[1].weight.detach().view(1, 1, 4, 4).sign()
    start = best.clamp(0, 1) if limits == "ball" else best
    try:
        worst = make(0.1, steps=2, loss="increase")(Target(net, task="regression"), x, torch.zeros(5), start=start)
    except TensorDropoutError:
        return  # refusing is as good as projecting
    assert_within(worst, x, "linf", 0.1, (0.0, 1.0))


def test_what_comes_from_a_source_with_wider_bounds_stays_within_the_targets():
    (x, y), target = load_digits(), Target(train_plain())
    source = Target(train_plain(1), bounds=(-1.0, 2.0))
    worst = Transfer(fgsm(0.2), source)(target, x[:50], y[:50])
    assert_within(worst, x[:50], "linf", 0.2, (0.0, 1.0))


@both_norms
def test_starts_fill_the_ball_and_far_starts_touch_its_surface(norm):
    x, generator = torch.rand(2000, 1, 3, 3, dtype=torch.float64), torch.Generator().manual_seed(0)
    inside = measure(norm, find_norm(norm).draw(x, 0.4, generator) - x)
    assert float(inside.max()) <= 0.4 + 1e-12
    # In n dimensions the share of the ball within the radius r is r^n.
    assert float(((inside / 0.4) ** 9).mean()) == pytest.approx(0.5, abs=0.03)
    far = measure(norm, find_norm(norm).draw_far(x, 0.4, generator) - x)
    torch.testing.assert_close(far, torch.full_like(far, 0.4))


@both_norms
def test_projection_is_the_nearest_point_of_the_ball(norm):
    x, z = torch.randn(50, 2, 3, dtype=torch.float64), torch.randn(50, 2, 3, dtype=torch.float64)
    projected = find_norm(norm).project(z, x, 0.7)
    assert float(measure(norm, projected - x).max()) <= 0.7 + 1e-12
    distance = (projected - z).flatten(1).norm(dim=1)
    for seed in range(50):
        other = find_norm(norm).draw(x, 0.7, torch.Generator().manual_seed(seed))
        assert bool(((other - z).flatten(1).norm(dim=1) >= distance - 1e-12).all())
    inside = x + 0.1 * torch.rand(50, 2, 3, dtype=torch.float64)
    torch.testing.assert_close(find_norm(norm).project(inside, x, 0.7), inside, rtol=0, atol=1e-15)


# Strength


def test_that_both_look_at_as_many_gradients(monkeypatch):
    counted, original = [], Target.ascend
    monkeypatch.setattr(Target, "ascend", lambda *args: counted.append(1) or original(*args))
    x, y = load_digits()
    for attack in (pgd(0.1, steps=20), APGD(0.1, steps=19)):
        counted.clear()
        attack(Target(train_robust()), x[:20], y[:20])
        assert len(counted) == 20


@pytest.mark.parametrize(
    ("make", "loss", "norm"),
    [
        *product((train_plain, train_mlp, train_robust), ("cross_entropy", "dlr", "margin"), BALLS),
        (train_tensor, "cross_entropy", "linf"),
    ],
)
def test_apgd_is_at_least_as_strong_as_pgd_at_equal_budget(make, loss, norm):
    """From one start, on all 360 images; of 120 runs from five starts, APGD was behind in two, by 1 and 2 images."""
    (x, y), target, gradients = load_digits(), Target(make(), batch=512), 20
    start = draw_start(norm, x, BALLS[norm])
    worst = pgd(BALLS[norm], steps=gradients, norm=norm, loss=loss)(target, x, y, start=start)
    adaptive = APGD(BALLS[norm], steps=gradients - 1, norm=norm, loss=loss)(target, x, y, start=start)
    assert find_accuracy(target, adaptive, y) <= find_accuracy(target, worst, y)
    assert find_accuracy(target, worst, y) < find_accuracy(target, x, y) - 0.1


@both_norms
def test_more_steps_and_a_larger_ball_never_help_the_defender(norm):
    (x, y), target = load_digits(), Target(train_plain(), batch=512)
    accuracies = [
        find_accuracy(target, APGD(share * BALLS[norm], steps=20, norm=norm)(target, x, y), y)
        for share in (0.3, 1, 2, 8)
    ]
    assert accuracies == sorted(accuracies, reverse=True)
    assert accuracies[-1] == 0
    start = draw_start(norm, x, BALLS[norm])
    longer = [
        find_accuracy(
            target, bim(BALLS[norm], steps=n, step=0.02, norm=norm, keep="best")(target, x, y, start=start), y
        )
        for n in (1, 5, 20)
    ]
    assert longer == sorted(longer, reverse=True)


@pytest.mark.parametrize("fake", [Rounded, Detached])
def test_square_needs_no_gradient_where_pgd_is_lost(fake):
    (x, y), target = (part[:200] for part in load_digits()), Target(fake(train_plain()), batch=512)
    clean = find_accuracy(target, x, y)
    assert clean > 0.95
    assert torch.equal(bim(0.15, steps=20)(target, x, y), x)  # no gradient, no step
    assert find_accuracy(target, pgd(0.15, steps=20)(target, x, y), y) > clean - 0.05
    assert find_accuracy(target, Square(0.15, queries=200)(target, x, y), y) < 0.45
    # Hiding the gradient has not made the network more robust: Square does as well on the network itself.
    honest = Target(train_plain(), batch=512)
    assert find_accuracy(honest, Square(0.15, queries=200)(honest, x, y), y) < 0.45


@pytest.mark.parametrize("size", [(1, 30), (2, 20), (1, 8, 8), (3, 5, 9), (1, 4, 5, 6)])
def test_square_works_on_signals_images_and_volumes(size):
    target = Target(Detached(make_linear(5, size)))
    x = torch.rand(60, *size)
    y = target.predict(x).output.argmax(1)
    worst = Square(0.15, queries=200)(target, x, y)
    assert_within(worst, x, "linf", 0.15, (0.0, 1.0))
    best = find_accuracy(target, pgd(0.15, steps=30, loss="margin")(Target(make_linear(5, size)), x, y), y)
    assert best <= find_accuracy(target, worst, y) < best + 0.15
    assert find_accuracy(target, worst, y) < 0.5


def test_squares_windows_shrink_as_published():
    # Andriushchenko et al., 2020: p is halved after 10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000 of 10,000 queries.
    halved = {0: 0, 10: 0, 11: 1, 50: 1, 51: 2, 200: 2, 201: 3, 500: 3, 501: 4, 1001: 5, 2001: 6, 4001: 7, 6001: 8}
    for query, halvings in {**halved, 8000: 8, 8001: 9, 9999: 9}.items():
        side = max(round((0.8 / 2**halvings * 224 * 224) ** 0.5), 1)
        assert _window_side(0.8, query / 10_000, torch.Size([224, 224])) == side
    assert _window_side(1.0, 0.0, torch.Size([7])) == 7
    assert _window_side(1.0, 0.0, torch.Size([4, 90])) == 4  # a window is square: no longer than the shortest side
    assert _window_side(0.8, 0.99, torch.Size([5, 5, 5])) == 1


def test_square_moves_to_the_corners_of_the_ball():
    x = torch.full((10, 2, 6, 6), 0.5)
    target = Target(make_linear(4, (2, 6, 6)))
    y = target.predict(x).output.argmin(1)
    worst = Square(0.2, queries=1)(target, x, (y + 1) % 4)
    change = (worst - x).abs()
    assert bool(((change < 1e-6) | ((change - 0.2).abs() < 1e-6)).all())


def test_random_search_is_weak_but_no_weaker_with_more_queries():
    (x, y), target = load_digits(), Target(train_plain(), batch=512)
    accuracies = [find_accuracy(target, RandomSearch(0.15, queries=n)(target, x, y), y) for n in (1, 10, 50)]
    assert accuracies == sorted(accuracies, reverse=True)
    assert find_accuracy(target, pgd(0.15, steps=10)(target, x, y), y) < accuracies[-1]


def test_a_transfer_attack_from_a_twin_passes_a_detached_gradient():
    (x, y), fake = load_digits(), Target(Detached(train_plain()), batch=512)
    source = Target(train_plain(1), batch=512)
    attack = Transfer(pgd(0.2, steps=20, keep="last"), source)
    assert attack.name == "transfer-pgd"
    assert attack.epsilon == 0.2
    worst = attack(fake, x, y)
    assert find_accuracy(fake, worst, y) < find_accuracy(fake, pgd(0.2, steps=20)(fake, x, y), y) - 0.5
    # What does not make it worse is not kept.
    target, margin = Target(train_plain(), batch=512), LOSSES["margin"]
    assert bool((target.score(worst, y, margin).loss >= target.score(x, y, margin).loss).all())


@pytest.mark.parametrize("attack", [pgd(0.2, steps=20), APGD(0.2, steps=20)], ids=["pgd", "apgd"])
def test_what_is_transferred_goes_the_whole_way(attack):
    """An example that leaves as soon as the source is fooled lies on the source's boundary, not beyond the target's."""
    (x, y), target, source = load_digits(), Target(train_plain(), batch=512), Target(train_plain(1), batch=512)
    whole = Transfer(pgd(0.2, steps=20, keep="last"), source)(target, x, y)
    assert find_accuracy(target, Transfer(attack, source)(target, x, y), y) < find_accuracy(target, whole, y) + 0.1


def test_a_fitted_twin_imitates_without_gradients_and_without_side_effects():
    x, _ = load_digits("train")
    target = Target(Detached(train_plain()), batch=512)
    torch.manual_seed(3)
    before = describe_state(target.members[0])
    twin = fit_twin(target, x[:512], epochs=6, seed=1)
    assert_same_state(before, describe_state(target.members[0]))
    again = fit_twin(target, x[:512], epochs=6, seed=1)
    assert torch.equal(twin.predict(x[:50]).output, again.predict(x[:50]).output)
    assert not twin.members[0].training
    test, y = load_digits()
    assert find_accuracy(twin, test, target.predict(test).output.argmax(1)) > 0.9
    worst = Transfer(pgd(0.2, steps=10, keep="last"), twin)(target, test, y)
    assert find_accuracy(target, worst, y) < find_accuracy(target, test, y) - 0.3


def test_a_twin_of_a_regression_speaks_in_its_unit():
    x, _ = load_digits("train")
    target = Target(train_regression(), task="regression", batch=512)
    twin = fit_twin(target, x[:400], epochs=7)
    test, _ = load_digits()
    expected, found = target.predict(test).output, twin.predict(test).output
    assert twin.task == "regression"
    assert float((found - expected).abs().mean()) < 0.5 * float((expected - expected.mean()).abs().mean())


# Restarts and early leaving


@both_norms
@pytest.mark.parametrize("way", ["pgd", "apgd"])
def test_more_restarts_never_help_the_defender(way, norm):
    (x, y), target = load_digits(), Target(train_plain(), batch=512)
    make = partial(pgd if way == "pgd" else APGD, BALLS[norm], steps=5, norm=norm)
    fooled = [is_fooled(target, make(restarts=n)(target, x, y), y) for n in (1, 2, 4)]
    for fewer, more in pairwise(fooled):
        assert bool((more | ~fewer).all())  # example by example
    assert fooled[-1].sum() > fooled[0].sum()


def test_restarts_of_a_regression_keep_the_largest_error():
    x, y = load_digits()
    target = Target(train_regression(), task="regression", batch=512)

    def find_errors(restarts):
        worst = pgd(0.1, steps=5, loss="absolute", restarts=restarts)(target, x, y.float())
        return (target.predict(worst).output[:, 0] - y).abs()

    once, often = find_errors(1), find_errors(4)
    assert bool((often >= once - 1e-5).all())
    assert bool((often > once + 1e-3).any())


def count_rows(net):
    """How many examples pass through the network; a list with one number per pass."""
    rows = []
    net.register_forward_hook(lambda module, inputs, output: rows.append(len(inputs[0])))
    return rows


def get_to_know(target, x):
    """What a target finds out once: the number of its outputs, and whether it is random."""
    target.count_outputs(x)
    target.is_randomized(x)
    return target


@both_norms
def test_fooled_examples_leave_and_the_batch_shrinks(norm):
    (x, y), net, epsilon = load_digits(), train_plain(), 2 * BALLS[norm]
    target, rows, start = get_to_know(Target(net, batch=512), x), count_rows(net), draw_start(norm, x, epsilon)
    attack = partial(Iterated, "pgd", epsilon, 0.2 * epsilon, 20, norm, "margin")
    last = attack(keep="last")(target, x, y, start=start)
    assert rows == [360] * 20
    rows.clear()
    best = attack(keep="best")(target, x, y, start=start)
    assert rows == sorted(rows, reverse=True)
    assert sum(rows) < 0.5 * 20 * 360
    assert len(rows) <= 22  # two more: for the clean input, and for where the last step has led
    # Who is fooled at the end was fooled on the way.
    assert bool((is_fooled(target, best, y) | ~is_fooled(target, last, y)).all())
    assert find_accuracy(target, best, y) <= find_accuracy(target, last, y)


def test_nobody_leaves_a_random_target_or_a_regression():
    (x, y), net = load_digits(), Noisy(train_plain(), 0.05)
    target, rows = get_to_know(Target(net, batch=512), x), count_rows(net)
    Iterated("pgd", 0.2, 0.05, 5)(target, x, y)
    assert set(rows) == {360}
    net = train_regression()
    target, rows = get_to_know(Target(net, task="regression", batch=512), x), count_rows(net)
    Iterated("pgd", 0.2, 0.05, 5, loss="absolute")(target, x, y)
    assert set(rows) == {360}


def test_nobody_leaves_a_target_whose_answer_is_not_that_of_its_mean_network():
    """ "exact" answers with the softmax averaged over masks; the mean network, wrong already, does not decide."""
    (x, y), net = (part[:60] for part in load_digits()), train_tensor()
    target = get_to_know(Target(net, mode="exact", n_samples=8), x)
    rows = count_rows(net.layer1)
    pgd(0.3, steps=8)(target, x, y)
    assert set(rows) == {60}


def test_apgd_and_square_shrink_too():
    (x, y), net = load_digits(), train_plain()
    target, rows = Target(net, batch=512), count_rows(net)
    for attack in (APGD(0.2, steps=20), APGD(0.2, steps=20, restarts=3), Square(0.3, queries=100)):
        rows.clear()
        attack(target, x, y)
        assert rows[-1] < 100
        assert sum(rows) < 0.6 * 360 * (attack.queries if isinstance(attack, Square) else 20 * attack.restarts)


# Regression


@pytest.mark.parametrize("make", [fgsm, bim, partial(pgd, steps=60, step=0.3), partial(APGD, steps=60)])
@both_norms
def test_a_linear_model_has_its_exact_optimum(make, norm):
    net = make_linear().double()
    weight = net[1].weight.detach().view(1, 1, 4, 4)
    direction = weight.sign() if norm == "linf" else weight / weight.norm()
    target, x = Target(net, bounds=(-2.0, 3.0), task="regression"), torch.rand(30, 1, 4, 4, dtype=torch.float64)
    clean = target.predict(x).output
    for loss, sign in (("increase", 1), ("decrease", -1)):
        worst = make(0.3, norm=norm, loss=loss)(target, x, clean)
        torch.testing.assert_close(worst, x + sign * 0.3 * direction, rtol=0, atol=1e-6)
    # The absolute error: away from the value given.
    for offset in (-50.0, 50.0):
        worst = make(0.3, norm=norm, loss="absolute")(target, x, clean + offset)
        torch.testing.assert_close(worst, x - math.copysign(0.3, offset) * direction, rtol=0, atol=1e-6)
        length = weight.abs().sum() if norm == "linf" else weight.norm()
        error = (target.predict(worst).output - clean - offset).abs()
        torch.testing.assert_close(error, torch.full_like(error, float(50 + 0.3 * length)), rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("make", [fgsm, bim, partial(pgd, steps=60, step=0.3), partial(APGD, steps=60)])
def test_a_linear_model_has_its_exact_optimum_at_the_bounds(make):
    net = make_linear().double()
    weight = net[1].weight.detach().view(1, 1, 4, 4)
    target, x = Target(net, task="regression"), torch.rand(30, 1, 4, 4, dtype=torch.float64)
    worst = make(0.4, loss="increase")(target, x, torch.zeros(30))
    torch.testing.assert_close(worst, (x + 0.4 * weight.sign()).clamp(0, 1), rtol=0, atol=1e-9)


def test_a_linear_classifier_has_its_exact_optimum():
    net = make_linear(2).double()
    weight = (net[1].weight[1] - net[1].weight[0]).detach().view(1, 1, 4, 4)
    x = 0.5 + 0.1 * torch.rand(30, 1, 4, 4, dtype=torch.float64)
    target, y = Target(net), torch.zeros(30).long()
    margin = target.ascend(x, y, LOSSES["margin"]).loss
    for norm, length in (("linf", weight.abs().sum()), ("l2", weight.norm())):
        worst = APGD(0.05, steps=60, norm=norm, loss="margin")(Everyone(net), x, y)
        found = target.ascend(worst, y, LOSSES["margin"]).loss
        torch.testing.assert_close(found, margin + 0.05 * length, rtol=1e-6, atol=1e-6)


@both_norms
def test_the_number_moves_the_way_it_should(norm):
    x, y = load_digits()
    target, y = Target(train_regression(), task="regression", batch=512), y.float()
    clean = target.predict(x).output[:, 0]
    moved = {
        loss: target.predict(APGD(BALLS[norm], steps=20, norm=norm, loss=loss)(target, x, y)).output[:, 0]
        for loss in ("increase", "decrease", "absolute")
    }
    assert bool((moved["increase"] > clean).all())
    assert bool((moved["decrease"] < clean).all())
    errors = {loss: (output - y).abs() for loss, output in moved.items()}
    assert bool((errors["absolute"] > (clean - y).abs()).all())
    # Absolute takes the better way of the two, but for local optima.
    better = torch.maximum(errors["increase"], errors["decrease"])
    assert float((errors["absolute"] >= 0.95 * better).float().mean()) > 0.8
    assert bool((errors["absolute"] <= 1.2 * better).all())


def test_targets_of_a_regression_may_be_flat_whole_numbers_or_doubles():
    x, y = load_digits()
    target = Target(train_regression(), task="regression", batch=512)
    attack = APGD(0.1, steps=5, loss="absolute")
    expected = attack(target, x[:40], y[:40].float())
    for same in (y[:40], y[:40].double(), y[:40, None].float()):
        torch.testing.assert_close(attack(target, x[:40], same), expected)


@pytest.mark.parametrize("mode", ["mean", "sample", "exact"])
@pytest.mark.parametrize("task", ["regression", "classification"])
def test_attacks_run_in_every_mode(task, mode):
    x, y = (part[:40] for part in load_digits())
    net = train_regression() if task == "regression" else train_tensor()
    target = Target(net, task=task, mode=mode, n_samples=6 if mode != "mean" else None)
    clean = target.predict(x).output
    for norm in BALLS:
        for attack in (pgd, APGD):
            loss = "increase" if task == "regression" else "margin"
            worst = attack(BALLS[norm], steps=6, norm=norm, loss=loss)(target, x, y)
            assert_within(worst, x, norm, BALLS[norm], (0.0, 1.0))
            found = target.predict(worst).output
            if task == "regression":
                assert float((found - clean).mean()) > 1
            else:
                right, before = ((p.argmax(1) == y).float().mean() for p in (found, clean))
                assert right < before - 0.2


def test_averaging_over_noise_makes_a_stronger_attack():
    (x, y), net = load_digits(), Noisy(train_mlp(), 0.3)
    found = []
    for eot_samples in (1, 16):
        target = Target(net, batch=512, n_samples=50, eot_samples=eot_samples)
        worst = pgd(0.05, steps=10, norm="linf", loss="margin", keep="last")(target, x, y)
        found.append(find_accuracy(target, worst, y))
    assert found[1] < found[0] - 0.02


# Saturated logits


def test_l2_directions_do_not_underflow():
    gradient = torch.randn(5, 1, 8, 8)
    unit = find_norm("l2").normalize(gradient)
    torch.testing.assert_close(measure("l2", unit), torch.ones(5).double())
    for scale in (1e-9, 1e-15, 1e-25, 1e-30, 1e6):
        torch.testing.assert_close(find_norm("l2").normalize(gradient * scale), unit, rtol=1e-5, atol=1e-6)
    gradient[0] = 0
    assert bool((find_norm("l2").normalize(gradient)[0] == 0).all())
    assert bool(find_norm("l2").normalize(gradient.double() * 1e-200)[1:].isfinite().all())


@both_norms
def test_saturated_logits_hide_cross_entropy_but_neither_dlr_nor_the_margin(norm):
    (x, y), net = (part[:120] for part in load_digits()), train_plain()
    plain, epsilon = Target(net, batch=512), BALLS[norm]
    for scale in (2.0**13, 1e4):
        scaled = Target(Scaled(net, scale), batch=512)
        assert find_accuracy(scaled, x, y) == find_accuracy(plain, x, y)
        for loss in ("margin", "dlr"):
            for attack in (pgd(epsilon, steps=10, norm=norm, loss=loss), APGD(epsilon, steps=10, norm=norm, loss=loss)):
                expected, found = attack(plain, x, y), attack(scaled, x, y)
                assert find_accuracy(scaled, found, y) == pytest.approx(find_accuracy(plain, expected, y), abs=0.017)
                if scale == 2.0**13 and norm == "linf":  # a power of two: not even the rounding differs
                    assert find_accuracy(scaled, found, y) == find_accuracy(plain, expected, y)
        hidden = pgd(epsilon, steps=15, norm=norm)(scaled, x, y)
        assert_within(hidden, x, norm, epsilon, (0.0, 1.0))
        seen = pgd(epsilon, steps=15, norm=norm)(plain, x, y)
        assert find_accuracy(scaled, hidden, y) > find_accuracy(plain, seen, y) + 0.2
        assert find_accuracy(scaled, hidden, y) <= find_accuracy(scaled, x, y)


@both_norms
def test_a_cross_entropy_that_is_tiny_but_not_0_still_leads_the_way(norm):
    (x, y), net = load_digits(), train_plain().double()
    x, plain, scaled = x.double(), Target(net, batch=512), Target(Scaled(net, 20.0), batch=512)
    gradient = scaled.ascend(x, y, LOSSES["cross_entropy"]).gradient.flatten(1).norm(dim=1)
    tiny = (gradient < 1e-12) & (gradient > 0)  # where a division by max(norm, 1e-12) would stand still
    assert tiny.sum() > 50
    worst = bim(BALLS[norm], steps=10, norm=norm)(scaled, x, y)
    moved = measure(norm, worst - x)
    assert float(moved[tiny].min()) > 0.3 * BALLS[norm]
    # A little weaker than the margin: softmax(z)_y - 1 is 0 when rounded, so that z_y itself is not pushed down.
    expected = find_accuracy(plain, bim(BALLS[norm], steps=10, norm=norm, loss="margin")(plain, x, y), y)
    assert find_accuracy(scaled, worst, y) == pytest.approx(expected, abs=0.12)


@pytest.mark.parametrize("loss", ["targeted_dlr", "targeted_margin"])
@pytest.mark.parametrize("goals", [1, 3])
def test_saturated_logits_do_not_hide_which_classes_are_likely(loss, goals):
    (x, y), net = load_digits(), train_plain()
    attack = APGD(0.1, steps=10, loss=loss, goals=goals)
    plain, scaled = Target(net, batch=512), Target(Scaled(net, 1e4), batch=512)
    expected = find_accuracy(plain, attack(plain, x, y), y)
    assert find_accuracy(scaled, attack(scaled, x, y), y) == pytest.approx(expected, abs=0.01)


# Losses


def test_losses_are_what_their_formulas_say():
    generator = torch.Generator().manual_seed(0)
    z, y = torch.randn(200, 6, generator=generator).double(), torch.randint(6, (200,), generator=generator)
    goal = (y + 1 + torch.randint(5, (200,), generator=generator)) % 6
    for i in range(200):
        others = torch.cat([z[i, : y[i]], z[i, y[i] + 1 :]])
        ranked = z[i].sort(descending=True).values
        gap = z[i, y[i]] - others.max()
        expected = {
            "cross_entropy": -z[i].log_softmax(0)[y[i]],
            "margin": -gap,
            "dlr": -gap / (ranked[0] - ranked[2]),
            "targeted_dlr": (z[i, goal[i]] - z[i, y[i]]) / (ranked[0] - (ranked[2] + ranked[3]) / 2),
            "targeted_cross_entropy": z[i].log_softmax(0)[goal[i]],
            "targeted_margin": z[i, goal[i]] - z[i, y[i]],
        }
        for name, value in expected.items():
            found = LOSSES[name](z[i : i + 1], y[i : i + 1], goal[i : i + 1])
            torch.testing.assert_close(found, value[None], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("loss", ["margin", "dlr"])
def test_the_margin_is_positive_just_where_the_argmax_is_wrong(loss):
    z, y = torch.randn(500, 7), torch.randint(7, (500,))
    assert torch.equal(LOSSES[loss](z, y) > 0, z.argmax(1) != y)
    tie = LOSSES[loss](torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([0]))
    assert float(tie) == 0


def test_a_loss_of_your_own():
    loss = Loss("second", "classification", lambda logits, y, goal: logits[:, 2] - logits[:, 0])
    x, target = torch.rand(9, 1, 4, 4), Target(make_linear(3))
    worst = bim(0.2, loss=loss)(target, x, torch.zeros(9).long())
    before, after = (target.ascend(z, torch.zeros(9).long(), loss).loss for z in (x, worst))
    assert bool((after > before).all())
    assert APGD(0.1, loss=loss).name == "apgd-second"
