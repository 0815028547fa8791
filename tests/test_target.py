"""What is attacked: randomness averaged, features computed once, nothing left changed, and bad input refused."""

from __future__ import annotations

import math
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import tensor_dropout as td
from robust_models import (
    Detached,
    Noisy,
    Rounded,
    Scaled,
    load_digits,
    train_dropout,
    train_mlp,
    train_plain,
    train_regression,
    train_tensor,
)
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.robustness import APGD, LOSSES, Iterated, RandomSearch, Square, Target, Transfer, bim, fgsm, pgd
from tensor_dropout.robustness.describe import describe_outcome
from tensor_dropout_lab.nets import build_net

CE = LOSSES["cross_entropy"]
INCREASE = LOSSES["increase"]
X, Y = torch.rand(6, 1, 4, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2])
NUMBERS = torch.linspace(0, 1, 6)


def make_net(outputs=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, outputs))


class Returns(nn.Module):
    """A network that returns what a function makes of its outputs."""

    def __init__(self, function, outputs=3):
        super().__init__()
        self.net, self.function = make_net(outputs), function

    def forward(self, x):
        return self.function(self.net(x))


class Raises(nn.Module):
    """A network that fails at its n-th pass."""

    def __init__(self, net, after=0):
        super().__init__()
        self.net, self.left = net, after

    def forward(self, x):
        self.left -= 1
        if self.left < 0:
            raise ArithmeticError("broken")
        return self.net(x)


def describe_state(net):
    return {
        "learning": [(p.requires_grad, p.grad) for p in net.parameters()],
        "modes": [module.training for module in net.modules()],
        "at_test": [m.at_test for m in net.modules() if isinstance(m, td.TensorDropout)],
        "emits": [m._instead_of_forward for m in net.modules() if isinstance(m, td.CPRegression)],
    }


def repeat(call, times=6):
    for _ in range(times):
        call()


def count_passes(module):
    rows = []
    module.register_forward_hook(lambda module, inputs, output: rows.append(len(inputs[0])))
    return rows


# Bad input


def attack_all(target, x, y, **options):
    """Every attack is to refuse, not just the first; returns the one message."""
    losses = {"classification": "cross_entropy", "regression": "absolute"}
    loss = options.pop("loss", losses[target.task])
    ball = options.pop("epsilon", 0.1)
    callers = [
        lambda: fgsm(ball, loss=loss)(target, x, y, **options),
        lambda: pgd(ball, loss=loss, steps=2)(target, x, y, **options),
    ]
    if not options:
        source = Target(make_net(1 if target.task == "regression" else 3), task=target.task)
        callers += [
            lambda: APGD(ball, loss=loss, steps=2)(target, x, y),
            lambda: Square(ball, loss=loss, queries=2)(target, x, y),
            lambda: RandomSearch(ball, loss=loss, queries=2)(target, x, y),
            lambda: Transfer(fgsm(ball, loss=loss), source)(target, x, y),
        ]
    messages = []
    for call in callers:
        with pytest.raises(TensorDropoutError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def assert_sentence(message, words):
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert 25 < len(message) < 330


def spoil(x, value):
    x = x.clone()
    x[3, 0, 1, 2] = value
    return x


BAD_INPUTS = {
    "above the bounds": (spoil(X, 1.2), Y, ["1.2", "bounds", "[0, 1]"]),
    "below the bounds": (spoil(X, -0.3), Y, ["-0.3", "bounds"]),
    "normalised already": (2 * (X - 0.5), Y, ["bounds", "prepare"]),
    "pixels of 0 to 255": (255 * X, Y, ["bounds"]),
    "NaN inputs": (spoil(X, math.nan), Y, ["not finite"]),
    "infinite inputs": (spoil(X, math.inf), Y, ["not finite"]),
    "whole numbers as inputs": ((X > 0.5).long(), Y, ["floating-point", "int64"]),
    "no inputs": (X[:0], Y[:0], ["B ≥ 1"]),
    "one number per example": (X[:, 0, 0, 0], Y, ["(B, C, *size)"]),
    "an array": (X.numpy(), Y, ["ndarray"]),
    "a label above": (X, torch.tensor([0, 1, 2, 0, 1, 3]), ["0..3", "0..2"]),
    "a negative label": (X, torch.tensor([0, 1, 2, 0, 1, -1]), ["-1..2", "0..2"]),
    "float labels": (X, Y.float(), ["whole numbers", "float32"]),
    "one-hot labels": (X, nn.functional.one_hot(Y), ["(6, 3)"]),
    "too few labels": (X, Y[:5], ["6 inputs", "(5,)"]),
    "too many labels": (X, torch.cat([Y, Y]), ["6 inputs", "(12,)"]),
    "a list of labels": (X, Y.tolist(), ["list"]),
}


@pytest.mark.parametrize(("x", "y", "words"), BAD_INPUTS.values(), ids=BAD_INPUTS.keys())
def test_bad_inputs_and_labels_are_refused(x, y, words):
    for message in attack_all(Target(make_net()), x, y):
        assert_sentence(message, words)


BAD_NUMBERS = {
    "too few numbers": (NUMBERS[:4], ["6 inputs", "(4,)"]),
    "two numbers for one output": (torch.rand(6, 2), ["1 outputs", "(6, 2)"]),
    "a number that is NaN": (NUMBERS.masked_fill(NUMBERS > 0.9, math.nan), ["not finite"]),
    "an infinite number": (NUMBERS.masked_fill(NUMBERS > 0.9, math.inf), ["not finite"]),
}


@pytest.mark.parametrize(("y", "words"), BAD_NUMBERS.values(), ids=BAD_NUMBERS.keys())
def test_bad_numbers_of_a_regression_are_refused(y, words):
    for message in attack_all(Target(make_net(1), task="regression"), X, y):
        assert_sentence(message, words)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_infinite_inputs_are_refused_without_bounds_too(value):
    target = Target(Returns(torch.tanh), bounds=(-math.inf, math.inf))
    target.check(1e6 * (X - 0.5), Y)
    with pytest.raises(TensorDropoutError, match="not finite"):
        target.check(spoil(X, value), Y)


@pytest.mark.parametrize("loss", ["cross_entropy", "margin", "dlr"])
def test_a_regression_is_not_attacked_as_a_classification(loss):
    target = Target(make_net(1), task="regression")
    for message in attack_all(target, X, NUMBERS, loss=loss)[:-1]:
        assert_sentence(message, [loss, "for a classification", "absolute, increase or decrease"])


@pytest.mark.parametrize("loss", ["absolute", "increase", "decrease"])
def test_a_classification_is_not_attacked_as_a_regression(loss):
    for message in attack_all(Target(make_net()), X, Y, loss=loss)[:-1]:
        assert_sentence(message, [loss, "for a regression", "cross_entropy, margin or dlr"])


def test_a_regression_that_is_attacked_towards_a_class():
    target = Target(make_net(1), task="regression")
    with pytest.raises(TensorDropoutError, match="for a classification"):
        APGD(0.1, loss="targeted_dlr")(target, X, NUMBERS)


@pytest.mark.parametrize("epsilon", [-0.1, 0, 0.0, math.inf, math.nan, "0.1", None, True])
@pytest.mark.parametrize(
    "make",
    [fgsm, bim, pgd, APGD, Square, RandomSearch, partial(Iterated, "own", step=0.1, steps=2)],
    ids=["fgsm", "bim", "pgd", "apgd", "square", "random", "iterated"],
)
def test_a_radius_is_a_positive_number(make, epsilon):
    try:
        with pytest.raises(TensorDropoutError) as caught:
            make(epsilon)
    except TypeError:
        assert isinstance(epsilon, str | None)  # 0.2 * "0.1": Python's own words will do
        return
    assert_sentence(str(caught.value), ["epsilon", "positive", repr(epsilon)])


BAD_SETTINGS = {
    "no steps": (lambda: pgd(0.1, steps=0, step=0.1), ["steps", "at least 1", "0"]),
    "no steps by default": (lambda: pgd(0.1, steps=0), ["steps", "at least 1", "0"]),
    "no steps of bim": (lambda: bim(0.1, steps=0), ["steps", "at least 1", "0"]),
    "half a step": (lambda: pgd(0.1, steps=2.5), ["steps", "2.5"]),
    "negative steps": (lambda: APGD(0.1, steps=-3), ["steps", "-3"]),
    "no restarts": (lambda: pgd(0.1, restarts=0), ["restarts"]),
    "no goals": (lambda: APGD(0.1, goals=0), ["goals"]),
    "no queries": (lambda: Square(0.1, queries=0), ["queries"]),
    "no random queries": (lambda: RandomSearch(0.1, queries=0), ["queries"]),
    "a negative step": (lambda: bim(0.1, step=-0.1), ["step", "-0.1"]),
    "a step of 0": (lambda: bim(0.1, step=0.0), ["step", "0.0"]),
    "a step that is NaN": (lambda: bim(0.1, step=math.nan), ["step", "nan"]),
    "an endless step": (lambda: bim(0.1, step=math.inf), ["step", "inf"]),
    "an unknown norm": (lambda: fgsm(0.1, norm="l1"), ["linf", "l2", "'l1'"]),
    "an unknown norm of APGD": (lambda: APGD(0.1, norm="Linf"), ["linf", "l2", "'Linf'"]),
    "an unknown norm of random search": (lambda: RandomSearch(0.1, norm="l7"), ["linf", "l2", "'l7'"]),
    "an unknown start": (lambda: Iterated("own", 0.1, 0.1, 2, start="here"), ["start", "'here'"]),
    "keeping nothing": (lambda: pgd(0.1, keep="none"), ["keep", "'none'"]),
    "restarts from one point": (lambda: Iterated("own", 0.1, 0.1, 2, restarts=3), ["3 restarts", "random"]),
    "restarts that keep the last": (lambda: pgd(0.1, keep="last", restarts=3), ["3 restarts", "best"]),
    "windows of nothing": (lambda: Square(0.1, share=0.0), ["share", "0.0"]),
    "windows beyond the image": (lambda: Square(0.1, share=1.5), ["share", "1.5"]),
    "bounds reversed": (lambda: Target(make_net(), bounds=(1, 0)), ["bounds", "(1, 0)"]),
    "bounds of no width": (lambda: Target(make_net(), bounds=(1, 1)), ["bounds", "(1, 1)"]),
    "bounds that are NaN": (lambda: Target(make_net(), bounds=(math.nan, 1)), ["bounds", "nan"]),
    "one bound": (lambda: Target(make_net(), bounds=(1,)), ["bounds", "(1,)"]),
    "an unknown mode": (lambda: Target(make_net(), mode="median"), ["'mean', 'sample' or 'exact'", "'median'"]),
    "an unknown task": (lambda: Target(make_net(), task="ranking"), ["'regression'", "'ranking'"]),
    "no samples": (lambda: Target(make_net(), n_samples=0), ["n_samples", "0"]),
    "no draws behind a gradient": (lambda: Target(make_net(), eot_samples=-1), ["eot_samples", "-1"]),
    "an empty batch": (lambda: Target(make_net(), batch=0), ["batch", "0"]),
    "no model": (lambda: Target(lambda x: x), ["module", "function"]),
    "no models": (lambda: Target([]), ["module", "list"]),
}


@pytest.mark.parametrize(("call", "words"), BAD_SETTINGS.values(), ids=BAD_SETTINGS.keys())
def test_bad_settings_are_refused(call, words):
    with pytest.raises(TensorDropoutError) as caught:
        call()
    assert_sentence(str(caught.value), words)


def test_an_unknown_loss_is_refused_with_those_known():
    for attack in (fgsm(0.1, loss="hinge"), APGD(0.1, loss="hinge"), Square(0.1, loss="hinge")):
        with pytest.raises(TensorDropoutError, match=r"no loss 'hinge'; known are cross_entropy, margin, dlr"):
            attack(Target(make_net()), X, Y)


def test_losses_that_need_more_classes():
    with pytest.raises(TensorDropoutError, match=r"'dlr' needs 3 classes, the network has 2; use 'margin'"):
        pgd(0.1, loss="dlr")(Target(make_net(2)), X, Y.clamp(max=1))
    with pytest.raises(TensorDropoutError, match=r"'dlr' needs 3 classes, the network has 2"):
        APGD(0.1, loss="dlr")(Target(make_net(2)), X, Y.clamp(max=1))
    with pytest.raises(TensorDropoutError, match=r"'targeted_dlr' needs 4 classes, the network has 3"):
        APGD(0.1, loss="targeted_dlr")(Target(make_net(3)), X, Y)
    fgsm(0.1, loss="margin")(Target(make_net(2)), X, Y.clamp(max=1))


@pytest.mark.parametrize("loss", ["targeted_cross_entropy", "targeted_margin", "targeted_dlr"])
def test_a_targeted_loss_needs_a_goal_that_fits(loss):
    target, attack = Target(make_net(5)), bim(0.1, loss=loss)
    with pytest.raises(TensorDropoutError, match=f"'{loss}' needs a goal"):
        attack(target, X, Y)
    attack(target, X, Y, goal=Y + 1)
    for goal in (Y + 10, Y - 1, Y[:3] + 1, (Y + 1).float(), (Y + 1)[:, None], [1, 2, 3, 1, 2, 3]):
        with pytest.raises(TensorDropoutError, match="goal"):
            attack(target, X, Y, goal=goal)


def test_a_start_has_the_shape_of_the_inputs():
    for attack in (pgd(0.1, steps=2), APGD(0.1, steps=2)):
        for start in (X[:3], X[:, :, :2], spoil(X, math.nan)):
            with pytest.raises(TensorDropoutError, match="start"):
                attack(Target(make_net()), X, Y, start=start)


def test_square_needs_a_place_to_put_its_windows():
    with pytest.raises(TensorDropoutError, match=r"square: inputs \(B, C, \*size\)"):
        Square(0.1)(Target(make_net()), X.flatten(1), Y)


BAD_MODELS = {
    "NaN": (lambda z: z * math.nan, ["NaN or infinity"]),
    "infinity": (lambda z: z / 0.0, ["NaN or infinity"]),
    "one NaN": (lambda z: z.masked_fill(z == z.max(), math.nan), ["NaN or infinity"]),
    "a tuple": (lambda z: (z, z), ["Returns returns a tuple", "wrap the model"]),
    "a dictionary": (lambda z: {"logits": z}, ["a dict"]),
    "one number per example": (lambda z: z[:, 0], ["(B, outputs)"]),
    "one class": (lambda z: z[:, :1], ["at least 2 outputs", "task='regression'"]),
    "one row for the batch": (lambda z: torch.cat([z, z]), ["(B, outputs)"]),
}


@pytest.mark.parametrize(("function", "words"), BAD_MODELS.values(), ids=BAD_MODELS.keys())
def test_models_that_cannot_be_attacked(function, words):
    target = Target(Returns(function))
    for message in attack_all(target, X, Y.clamp(max=0)):
        assert_sentence(message, words)


def test_a_network_with_one_class_is_refused_every_time():
    target = Target(make_net(1))
    for _ in range(2):
        with pytest.raises(TensorDropoutError, match="at least 2 outputs"):
            target.check(X, Y.clamp(max=0))


@pytest.mark.parametrize("call", ["predict", "ascend", "score"])
def test_no_number_comes_from_a_network_that_returns_nan(call):
    for function in (lambda z: z * math.nan, lambda z: z / 0.0):
        for task in ("classification", "regression"):
            target = Target(Returns(function), task=task)
            arguments = {"predict": (X,)}.get(call, (X, Y, CE))
            with pytest.raises(TensorDropoutError, match="NaN or infinity"):
                getattr(target, call)(*arguments)


def test_a_preparation_that_divides_by_zero():
    with pytest.raises(TensorDropoutError, match="does prepare divide by zero"):
        fgsm(0.1)(Target(make_net(), prepare=lambda x: x / (x - x)), X, Y)


def test_every_kind_of_whole_number_is_a_label():
    target = Target(make_net())
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        assert torch.equal(pgd(0.1, steps=2)(target, X, Y.to(dtype)), pgd(0.1, steps=2)(target, X, Y))


# Averaging over randomness


@pytest.mark.parametrize("make", [train_dropout, train_tensor, lambda: Noisy(train_plain(), 0.1)])
@pytest.mark.parametrize("loss", ["cross_entropy", "margin"])
def test_a_gradient_is_the_mean_over_the_draws(make, loss):
    x, y = (part[:12] for part in load_digits())
    net, n = make(), 5
    target = Target(net, mode="sample", eot_samples=n)
    torch.manual_seed(4)
    found = target.ascend(x, y, LOSSES[loss])

    net.eval()
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.train()
        if isinstance(module, td.TensorDropout):
            module.at_test, module.per_sample = "sample", True  # the target draws for every example
    torch.manual_seed(4)
    losses, gradients, probs = [], [], []
    for _ in range(n):
        z = x.clone().requires_grad_()
        logits = net(z)
        value = LOSSES[loss](logits, y)
        value.sum().backward()
        losses.append(value.detach())
        gradients.append(z.grad)
        probs.append(logits.detach().softmax(1))
    torch.testing.assert_close(found.loss, torch.stack(losses).mean(0))
    torch.testing.assert_close(found.gradient, torch.stack(gradients).mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.scores.exp(), torch.stack(probs).mean(0))
    assert not torch.equal(gradients[0], gradients[1])

    torch.manual_seed(4)
    net.eval()
    scored = Target(net, mode="sample", eot_samples=n).score(x, y, LOSSES[loss])
    torch.testing.assert_close(scored.loss, found.loss)
    torch.testing.assert_close(scored.scores, found.scores)
    assert not scored.gradient.any()


def test_the_averaged_gradient_tends_to_that_of_the_mean_network():
    """The output is linear in the masks of a CP layer, whose mean is 1: so is the gradient of ``increase``."""
    x, y = (part[:8] for part in load_digits())
    net, y = train_regression(), y.float()
    mean = Target(net, task="regression").ascend(x, y, INCREASE).gradient
    single = Target(net, task="regression", mode="sample", eot_samples=1)
    draws = torch.stack([single.ascend(x, y, INCREASE).gradient for _ in range(200)])
    error = draws.std(0) / 200**0.5
    many = Target(net, task="regression", mode="sample", eot_samples=200).ascend(x, y, INCREASE).gradient
    for average in (draws.mean(0), many):
        assert bool(((average - mean).abs() <= 6 * error + 1e-6).all())
        assert float((average - mean).abs().mean()) < 3 * float(error.mean()) < float(mean.abs().mean())


def test_features_are_computed_once_when_only_the_head_is_random():
    x, y = (part[:10] for part in load_digits())
    net = train_tensor()
    backbone = count_passes(net.layer1)
    target = Target(net, mode="sample", n_samples=16, eot_samples=7, batch=64)
    for call in (lambda: target.predict(x), lambda: target.ascend(x, y, CE), lambda: target.score(x, y, CE)):
        backbone.clear()
        call()
        assert backbone == [10]
    backbone.clear()
    Target(net, mode="sample", n_samples=16, batch=4).predict(x)
    assert backbone == [4, 4, 2]
    backbone.clear()
    Target([net, net], mode="sample", n_samples=16).predict(x)
    assert backbone == [10, 10]

    # Of another network nothing is known, so the whole of it runs.
    wrapped = Noisy(train_tensor(), 0.1)
    rows = count_passes(wrapped.net.layer1)
    Target(wrapped, mode="sample", n_samples=6).predict(x)
    assert rows == [10] * 6


def test_draws_of_the_head_alone_are_draws_of_the_whole_network():
    x, _ = (part[:10] for part in load_digits())
    net = train_tensor()
    fast = Target(net, mode="sample", n_samples=9)
    torch.manual_seed(1)
    found = fast.predict(x).output
    net.fc.dropout.per_sample = True  # as the target draws
    slow = Target(nn.Sequential(net), mode="sample", n_samples=9)
    assert (fast._heads_only, slow._heads_only) == (True, False)
    torch.manual_seed(1)
    torch.testing.assert_close(found, slow.predict(x).output)
    # One mask for the whole batch has the same law for every example.
    net.fc.dropout.per_sample = False
    slow, fast = (Target(net, mode="sample", n_samples=300) for net in (nn.Sequential(net), net))
    torch.testing.assert_close(fast.predict(x).output, slow.predict(x).output, rtol=0, atol=0.12)


def test_a_residual_network_with_plain_dropout_runs_as_a_whole():
    x = load_digits()[0][:5]
    net = build_net("resnet-mini", outputs=10, input_shape=(1, 8, 8), head="fc+dropout", drop_rate=0.5).eval()
    rows = count_passes(net.layer1)
    target = Target(net, mode="sample", n_samples=4)
    target.predict(x)
    assert rows == [5] * 4
    assert target.is_randomized(x)


def test_dropout_on_the_entries_of_a_weight_is_drawn_too():
    x = load_digits()[0][:5]
    net = build_net(
        "resnet-mini", outputs=10, input_shape=(1, 8, 8), head="trl-tucker+weight-dropout", theta=0.5
    ).eval()
    assert Target(net, mode="sample").is_randomized(x)
    assert not Target(net).is_randomized(x)
    assert not any(module.training for module in net.modules())


def test_monte_carlo_dropout_draws_and_averages():
    x, _ = (part[:30] for part in load_digits())
    net = train_dropout()
    target = Target(net, mode="sample", n_samples=200)
    torch.manual_seed(2)
    found = target.predict(x).output
    assert not net[6].training
    net[6].train()
    torch.manual_seed(2)
    expected = torch.stack([net(x).softmax(1) for _ in range(200)]).mean(0)
    torch.testing.assert_close(found, expected)
    net.eval()
    assert not torch.allclose(found, net(x).softmax(1), atol=1e-3)
    assert target.is_randomized(x)
    assert not Target(net).is_randomized(x)


def test_batch_norm_keeps_its_statistics_while_dropout_draws():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(16, 3))
    net.train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    target = Target(net, mode="sample", n_samples=4)
    target.predict(X)
    target.ascend(X, Y, CE)
    pgd(0.1, steps=2)(target, X, Y)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert all(module.training for module in net.modules())


MODES = ["mean", "sample", "exact"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("training", [True, False, "mixed"])
@pytest.mark.parametrize("call", ["predict", "ascend", "score", "examine", "check", "is_randomized"])
def test_modes_settings_and_flags_come_back(call, training, mode):
    x, y = (part[:6] for part in load_digits())
    net = train_tensor()
    net.train(bool(training))
    if training == "mixed":
        net.bn1.eval()
        net.conv1.weight.requires_grad_(False)
    net.fc.dropout.at_test = "sample"
    target, before = Target(net, mode=mode, n_samples=3), describe_state(net)
    arguments = {"predict": (x,), "is_randomized": (x,), "check": (x, y)}.get(call, (x, y, CE))
    getattr(target, call)(*arguments)
    assert describe_state(net) == before


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("after", [0, 1, 3])
def test_modes_come_back_even_if_the_network_fails(after, mode):
    head = td.CPRegression((2, 2), 3, rank=2, init="normal", dropout=td.TensorDropout(0.7, at_test="sample"))
    body = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Dropout(0.5), nn.Unflatten(1, (2, 2)), head)
    net = Raises(body.train(), after)
    net.net[2].eval()
    before = describe_state(net)
    target = Target(net, mode=mode, n_samples=5)
    for call in (lambda: target.ascend(X, Y, CE), lambda: pgd(0.1)(target, X, Y), lambda: target.predict(X)):
        net.left = after
        with pytest.raises(ArithmeticError, match="broken"):
            repeat(call)
        assert describe_state(net) == before


def test_the_preparation_comes_before_the_network_and_passes_the_gradient():
    net = make_net()
    target = Target(net, bounds=(0, 255), prepare=lambda x: x / 255)
    found, plain = target.ascend(255 * X, Y, CE), Target(net).ascend(X, Y, CE)
    torch.testing.assert_close(found.loss, plain.loss)
    torch.testing.assert_close(found.gradient, plain.gradient / 255)
    worst, expected = bim(25.5)(target, 255 * X, Y), bim(0.1)(Target(net), X, Y)
    torch.testing.assert_close(worst, 255 * expected, rtol=1e-4, atol=1e-2)


def test_batches_do_not_matter():
    x, y = (part[:50] for part in load_digits())
    net = train_mlp().double()
    whole, parts = (Target(net, batch=batch) for batch in (512, 7))
    for a, b in zip(whole.ascend(x.double(), y, CE), parts.ascend(x.double(), y, CE), strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(whole.predict(x.double()).output, parts.predict(x.double()).output)
    attack = APGD(0.1, steps=10)
    torch.testing.assert_close(attack(whole, x.double(), y), attack(parts, x.double(), y))


ATTACKS = [fgsm(0.1), pgd(0.1, steps=5), APGD(0.1, steps=5), APGD(0.1, steps=3, norm="l2", loss="margin")]


@pytest.mark.parametrize("without", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("attack", ATTACKS, ids=["fgsm", "pgd", "apgd", "apgd-l2"])
def test_attacks_are_the_same_where_gradients_are_off(attack, without):
    x, y = (part[:60] for part in load_digits())
    target = Target(train_plain())
    expected, gradient = attack(target, x, y), target.ascend(x, y, CE).gradient
    assert not torch.equal(expected, x)
    with without():
        found, inside = attack(target, x, y), target.ascend(x, y, CE).gradient
        made_inside = attack(target, x.clone(), y.clone())
        copies = x.clone(), y.clone()
    for each in (found, made_inside, attack(target, *copies)):
        torch.testing.assert_close(each.clone(), expected, rtol=0, atol=0)
    torch.testing.assert_close(inside.clone(), gradient, rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_random_targets_have_the_same_gradient_inside_inference_mode(mode):
    x, y = (part[:12] for part in load_digits())
    target = Target(train_tensor(), mode=mode, n_samples=3)

    def ascend():
        torch.manual_seed(5)
        return target.ascend(x, y, CE).gradient

    with torch.inference_mode():
        inside = ascend()
    torch.testing.assert_close(inside.clone(), ascend(), rtol=0, atol=0)
    assert bool(inside.any())


def test_a_network_made_inside_inference_mode_is_refused():
    with torch.inference_mode():
        target = Target(make_net())
        with pytest.raises(TensorDropoutError) as caught:
            fgsm(0.1)(target, X, Y)
    assert_sentence(str(caught.value), ["made inside torch.inference_mode", "outside"])
    with pytest.raises(TensorDropoutError, match=r"made inside torch\.inference_mode"):
        fgsm(0.1)(target, X, Y)
    assert target.predict(X).output.shape == (6, 3)


def test_a_missing_gradient_is_warned_of_once():
    target = Target(Detached(make_net()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not target.examine(X, Y, CE).differentiable  # its answer says so
        pgd(0.1, steps=2)(Target(Rounded(make_net())), X, Y)  # a gradient of zeros is one
    with pytest.warns(UserWarning, match=r"no gradient comes back from Detached .* not robustness") as caught:
        pgd(0.1, steps=5)(target, X, Y)
    assert len(caught) == 1
    prepared = Target(make_net(), prepare=lambda x: torch.from_numpy(x.detach().numpy() - 0.5))
    with pytest.warns(UserWarning, match="or its preparation"):
        assert not prepared.ascend(X, Y, CE).gradient.any()


def test_clip():
    assert Target(make_net(), bounds=(-1, 2)).clip(torch.tensor([-3.0, 0.5, 4.0])).tolist() == [-1, 0.5, 2]


# Ensembles


def test_an_ensemble_averages_probabilities():
    x, y = (part[:40] for part in load_digits())
    nets = [train_plain(), train_plain(1), train_mlp()]
    target = Target(nets)
    expected = torch.stack([net(x).softmax(1) for net in nets]).mean(0)
    predicted = target.predict(x)
    torch.testing.assert_close(predicted.output, expected)
    assert predicted.std is None
    found = target.ascend(x, y, CE)
    torch.testing.assert_close(found.scores.exp(), expected)
    torch.testing.assert_close(found.loss, torch.stack([CE(net(x), y) for net in nets]).mean(0))
    singles = [Target(net).ascend(x, y, CE).gradient for net in nets]
    torch.testing.assert_close(found.gradient, torch.stack(singles).mean(0), rtol=1e-4, atol=1e-6)
    assert not target.is_randomized(x)
    worst = APGD(0.15, steps=10, loss="margin")(target, x, y)
    before, after = (float((target.predict(z).output.argmax(1) == y).float().mean()) for z in (x, worst))
    assert after < before - 0.3


def test_one_loud_member_does_not_drown_the_others():
    """Logits are not averaged: a member with logits times 1,000 has one vote."""
    x, _ = (part[:40] for part in load_digits())
    nets = [train_plain(), train_plain(1), Scaled(train_mlp(), 1000.0)]
    expected = torch.stack([net(x).softmax(1) for net in nets]).mean(0)
    torch.testing.assert_close(Target(nets).predict(x).output, expected)
    torch.testing.assert_close(Target(nets).ascend(x, expected.argmax(1), CE).scores.exp(), expected)


def test_an_ensemble_of_regressions_spreads():
    nets = [make_net(2) for _ in range(4)]
    draws = torch.stack([net(X) for net in nets]).detach()
    predicted = Target(nets, task="regression").predict(X)
    torch.testing.assert_close(predicted.output, draws.mean(0))
    torch.testing.assert_close(predicted.std, draws.std(0))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_copies_of_a_network_are_one_network_under_noise(task, mode):
    """Members see the same noise: an average over it would be another network's."""
    x, net = load_digits()[0][:20], train_regression() if task == "regression" else train_tensor()

    def predict_noisy(members, n):
        noise = torch.Generator().manual_seed(0)
        torch.manual_seed(1)

        def prepare(x):
            return x + 0.5 * torch.randn(x.shape, generator=noise)

        target = Target(members, prepare=prepare, task=task, mode=mode, n_samples=1 if mode == "mean" else n, batch=16)
        return target.predict(x).output

    if mode == "mean":
        assert not torch.allclose(predict_noisy(net, 1), Target(net, task=task).predict(x).output, atol=0.01)
    # As many draws in all, of the same random numbers.
    many, one = predict_noisy([net] * 3, 4), predict_noisy(net, 12)
    torch.testing.assert_close(many, one, rtol=1e-4, atol=1e-5)


# Exact


def test_exact_is_the_exact_prediction():
    x, y = (part[:20] for part in load_digits())
    net = train_regression()
    predicted = Target(net, task="regression", mode="exact").predict(x)
    expected = td.predict(net, x, mode="exact", task="regression")
    torch.testing.assert_close(predicted.output, expected.mean)
    torch.testing.assert_close(predicted.std, expected.std)
    assert predicted.std.shape == (20, 1)
    # The gradient is that of the mean network, whose output is the exact mean.
    torch.testing.assert_close(
        Target(net, task="regression", mode="exact").ascend(x, y, INCREASE).gradient,
        Target(net, task="regression").ascend(x, y, INCREASE).gradient,
    )


def test_exact_agrees_with_many_draws():
    x = load_digits()[0][:10]
    net = train_regression()
    exact = Target(net, task="regression", mode="exact").predict(x)
    sampled = Target(net, task="regression", mode="sample", n_samples=800).predict(x)
    error = sampled.std / 800**0.5
    assert bool(((exact.output - sampled.output).abs() < 6 * error).all())
    torch.testing.assert_close(exact.std, sampled.std, rtol=0.15, atol=1e-3)


def test_exact_probabilities_are_those_of_predict():
    x = load_digits()[0][:20]
    net = train_tensor()
    torch.manual_seed(3)
    found = Target(net, mode="exact", n_samples=40).predict(x)
    torch.manual_seed(3)
    torch.testing.assert_close(found.output, td.predict(net, x, mode="exact", n_samples=40).probs)
    assert found.std is None


def test_an_exact_ensemble_has_the_variance_within_and_between():
    x = load_digits()[0][:20]
    nets = [train_regression(), train_regression()]
    with torch.no_grad():
        for parameter in nets[1][0].parameters():
            parameter.mul_(0.7)
    predicted = Target(nets, task="regression", mode="exact").predict(x)
    members = [td.predict(net, x, mode="exact", task="regression") for net in nets]
    mean = (members[0].mean + members[1].mean) / 2
    second = sum(member.std.square() + member.mean.square() for member in members) / 2
    assert float((members[0].mean - members[1].mean).abs().mean()) > 0.3
    torch.testing.assert_close(predicted.output, mean)
    torch.testing.assert_close(predicted.std, (second - mean.square()).sqrt(), rtol=1e-3, atol=1e-4)


def test_a_backbone_that_is_random_itself_is_drawn_with_its_head():
    torch.manual_seed(0)
    net = build_net("resnet-mini", outputs=2, input_shape=(1, 8, 8), head="rtrl-cp", rank=4, theta=0.9).eval()
    net.maxpool = Noisy(nn.Identity(), 0.5)
    x = load_digits()[0][:16]
    found = Target(net, mode="sample", task="regression", n_samples=300).predict(x).std
    expected = td.predict(net, x, mode="sample", task="regression", n_samples=300).std
    assert float(found.mean() / expected.mean()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("mode", MODES)
def test_no_probability_is_too_small_for_its_logarithm(mode):
    head = td.CPRegression((1, 1, 2), 2, rank=2, init="normal", dropout=0.999)
    with torch.no_grad():
        for factor in head.factors:
            factor.copy_(torch.ones_like(factor))
        head.factors[-1][:] = torch.tensor([[100.0, 100.0], [0.0, 0.0]])
        head.bias.zero_()
    torch.manual_seed(0)
    predicted = Target(head.eval(), mode=mode, n_samples=4 if mode != "mean" else None).predict(torch.ones(2, 1, 1, 2))
    assert (predicted.output[:, 1] == 0).all()
    found = describe_outcome(predicted, torch.tensor([0, 1]), "classification")
    assert found["nll"].tolist() == pytest.approx([0, 400], rel=0.02)  # a kept rank weighs 1/0.999


def test_exact_needs_tensor_dropout():
    with pytest.raises(TensorDropoutError, match="no tensor regression layer with dropout"):
        Target(make_net(), mode="exact").predict(X)


# Regressions with several outputs


@pytest.mark.parametrize("mode", MODES)
def test_a_regression_with_several_outputs(mode):
    head = td.TuckerRegression((2, 3), 4, "full", init="normal", dropout=0.7)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Unflatten(1, (2, 3)), head).eval()
    target = Target(net, task="regression", mode=mode, n_samples=None if mode == "mean" else 6)
    y = torch.randn(6, 4)
    predicted = target.predict(X)
    assert predicted.output.shape == (6, 4)
    if mode == "mean":
        assert predicted.std is None
        torch.testing.assert_close(predicted.output, net(X))
        expected = (net(X) - y).abs().sum(1)
        torch.testing.assert_close(target.ascend(X, y, LOSSES["absolute"]).loss, expected)
        torch.testing.assert_close(target.ascend(X, y, INCREASE).loss, (net(X) - y).sum(1))
        torch.testing.assert_close(target.ascend(X, y, LOSSES["decrease"]).loss, (y - net(X)).sum(1))
    else:
        assert predicted.std.shape == (6, 4)
        assert bool((predicted.std > 0).all())
    quiet = Target(net, task="regression")
    for loss in ("absolute", "increase", "decrease"):
        worst = APGD(0.2, steps=10, loss=loss)(target, X, y)
        before, after = (quiet.score(z, y, LOSSES[loss]).loss for z in (X, worst))
        assert float((after - before).mean()) > 0.05
        assert mode == "sample" or bool((after > before).all())


def test_outputs_of_any_shape_are_flattened():
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Unflatten(1, (2, 3)))
    target = Target(net, task="regression")
    assert target.predict(X).output.shape == (6, 6)
    assert target.count_outputs(X) == 6
    y = torch.randn(6, 2, 3)
    torch.testing.assert_close(target.ascend(X, y, LOSSES["absolute"]).loss, (net(X) - y).abs().sum((1, 2)))
    assert bim(0.1, loss="absolute")(target, X, y).shape == X.shape


def test_a_sample_of_one_has_no_spread():
    assert (
        Target(train_regression(), task="regression", mode="sample", n_samples=1).predict(load_digits()[0]).std is None
    )


# Examination


def examine(net, loss=CE, **options):
    x, y = (part[:50] for part in load_digits())
    return Target(net, **options).examine(x, y, loss)


def test_an_honest_network_is_neither_random_nor_flat():
    for net in (train_plain(), train_mlp(), train_tensor()):
        nature = examine(net)
        assert not nature.randomized
        assert nature.differentiable
        assert nature.zero_gradients == 0


@pytest.mark.parametrize("fake", [Rounded, Detached])
def test_a_network_without_gradients_is_found(fake):
    nature = examine(fake(train_plain()))
    assert not nature.differentiable
    assert nature.zero_gradients == 1
    assert not nature.randomized


def test_a_network_without_autograd_is_found():
    class Without(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                return train_plain()(x)

    assert not examine(Without()).differentiable


def test_a_random_network_is_found():
    assert examine(Noisy(train_plain(), 0.05)).randomized
    assert examine(train_tensor(), mode="sample").randomized
    assert examine(train_dropout(), mode="sample").randomized
    # "exact": of a class the softmax is averaged over draws, of a number the mean is exact.
    assert examine(train_tensor(), mode="exact").randomized
    assert not examine(train_regression(), INCREASE, mode="exact", task="regression").randomized
    assert examine(Noisy(train_plain(), 0.05)).differentiable


LAWS = {
    "nested": ("nested", 0.8, 0, True),
    "bernoulli": ("bernoulli", 0.999, 0, True),
    "bernoulli without dropping": ("bernoulli", 1.0, 0, False),
    "bernoulli that may drop none": ("bernoulli", 0.5, 4, False),
    "gaussian": ("gaussian", 0.9, 0, True),
    "gaussian without noise": ("gaussian", 1.0, 0, False),
    "replacement, a bootstrap": ("replacement", 1.0, 0, True),
}


@pytest.mark.parametrize("case", LAWS)
def test_whether_masks_are_random_is_no_matter_of_luck(case):
    """Both masks of two draws are often alike; the layers know better."""
    law, theta, least, expected = LAWS[case]
    dropout = td.TensorDropout(theta, law=law, min_rank=least)
    net = td.CPRegression((1, 4, 4), 3, rank=4, dropout=dropout)
    for seed in range(10):
        torch.manual_seed(seed)
        assert Target(net, mode="sample").is_randomized(X) is expected
        assert Target(net, mode="exact").is_randomized(X) is expected
        assert not Target(net).is_randomized(X)
        assert not Target(net, mode="exact", task="regression").is_randomized(X)  # attacked is the exact mean


class Rarely:
    """A law without second moments: mostly all ranks, now and then none."""

    def draw(self, shape, theta, *, device):
        return (torch.rand((*shape[:-1], 1), device=device) < theta).float().expand(shape)

    def mean(self, R, theta):
        return theta.double().expand(R)

    def second_moment(self, R, theta):
        return None

    support = second_moment


def test_a_law_that_tells_no_moments_is_looked_at():
    net = td.CPRegression((1, 4, 4), 3, rank=4, dropout=td.TensorDropout(0.95, law=Rarely()))
    assert all(Target(net, mode="sample").is_randomized(X) for _ in range(10))
    net.dropout.theta = 1.0
    assert not Target(net, mode="sample").is_randomized(X)


class Flickers(nn.Module):
    """Adds noise to the whole batch in two passes of five."""

    def forward(self, x):
        return x + (torch.rand(()) < 0.4) * torch.randn_like(x)


def test_rare_noise_is_found_in_many_passes():
    found = 0
    for seed in range(50):
        torch.manual_seed(seed)
        found += Target(nn.Sequential(Flickers(), make_net())).is_randomized(X)
    assert found >= 49


def test_a_network_that_samples_when_deployed_is_evaluated_as_it_is():
    net = td.CPRegression((1, 4, 4), 3, rank=4, dropout=td.TensorDropout(0.5, at_test="sample")).eval()
    assert Target(net).is_randomized(X)
    assert not torch.equal(Target(net).predict(X).output, Target(net).predict(X).output)
    assert not Target(net, mode="exact", task="regression").is_randomized(X)


def test_saturated_logits_vanish_for_cross_entropy_but_not_for_the_margin():
    net = Scaled(train_plain(), 1000.0)
    assert examine(net).zero_gradients > 0.8
    assert examine(net, LOSSES["margin"]).zero_gradients == 0
    assert examine(net, LOSSES["dlr"]).zero_gradients == 0


def test_a_gradient_that_vanishes_for_some_is_counted():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = train_plain()

        def forward(self, x):
            keep = (torch.arange(len(x)) % 2 == 0).view(-1, 1, 1, 1)
            return self.net(torch.where(keep, x, x.detach()))

    nature = examine(Half())
    assert nature.zero_gradients == 0.5
    assert nature.differentiable


def test_a_gradient_that_is_nan_counts_as_none():
    class Edgy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def forward(self, x):
            return self.net(x) + 0 * x.sub(x.detach()).abs().sqrt().sum((1, 2, 3))[:, None]

    found = Target(Edgy()).ascend(X, Y, CE)
    assert bool(found.gradient.isfinite().all())
    assert Target(Edgy()).examine(X, Y, CE).zero_gradients == 1


def test_examining_leaves_the_random_numbers_of_a_deterministic_network_alone():
    before = torch.get_rng_state()
    examine(train_plain())
    assert torch.equal(torch.get_rng_state(), before)
