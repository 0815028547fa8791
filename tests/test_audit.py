"""The audit: catches planted fakes, passes honest networks, and every rule can be broken on its own."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import tensor_dropout as td
from robust_models import Detached, Noisy, Rounded, Scaled, load_digits, train_plain, train_robust
from tensor_dropout.robustness import Target
from tensor_dropout.robustness.audit import LOSS_SLACK, SLACK, UNBOUNDED_ACCURACY, VANISHED_SHARE, Evidence, audit
from tensor_dropout.robustness.evaluation import evaluate
from tensor_dropout.robustness.settings import Settings
from tensor_dropout_lab.evaluation.twin import fit_twin

BUDGETS = ("0.05", "0.1", "0.2")


class Decoy(nn.Module):
    """No true gradient comes back, but a wrong one, of the size of a true one."""

    def __init__(self, net, strength):
        super().__init__()
        self.net, self.strength = net, strength

    def forward(self, x):
        decoy = x.flatten(1)[:, :10]
        return self.net(x.detach()) + self.strength * (decoy - decoy.detach())


def audit_model(model, images=100):
    x, y = load_digits("test")
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:images]
    settings = Settings(budgets=BUDGETS, noise=(), steps=10, queries=60, main="0.1")
    target = Target(model, batch=512)

    def imitate():
        return fit_twin(target, load_digits("train")[0], epochs=5, seed=1)

    return evaluate(target, x[chosen], y[chosen], settings, twin=imitate).audit()


FAKES = {
    "rounds its input to 17 levels": (lambda net: Rounded(net, 16), "gradients"),
    "logits times 100": (lambda net: Scaled(net, 100), "losses"),
    "adds noise of 0.1": (lambda net: Noisy(net, 0.1), "randomness"),
    "detached": (Detached, "gradients"),
    "detached, with a decoy gradient": (lambda net: Decoy(net, 1.0), "black box"),
}


@pytest.mark.parametrize("fake", FAKES)
def test_planted_fakes_are_called_gradient_masking(fake):
    wrap, rule = FAKES[fake]
    images = 40 if "noise" in fake else 100  # nobody leaves early, and every gradient is an average
    found = audit_model(wrap(train_plain()), images)
    assert found.masked
    assert found.verdict.startswith("GRADIENT MASKING")
    assert rule in [check.name for check in found.checks if check.passed is False]


@pytest.mark.parametrize("seed", range(2))
def test_honest_adversarially_trained_networks_pass(seed):
    found = audit_model(train_robust(seed))
    assert not found.masked, found
    assert all(check.passed for check in found.checks)
    assert found.verdict.startswith("No sign of gradient masking")


def test_an_undefended_network_is_not_accused():
    assert not audit_model(train_plain()).masked


def test_a_network_that_draws_masks_when_deployed_is_random_though_its_mean_was_asked_for():
    torch.manual_seed(0)
    dropout = td.TensorDropout(0.5, at_test="sample")
    net = nn.Sequential(nn.Conv2d(1, 4, 3), td.CPRegression((4, 6, 6), 10, rank=8, dropout=dropout))
    found = {check.name: check for check in audit_model(net, 20).checks}["randomness"]
    assert found.passed is False
    assert "although its mean was asked for" in found.finding


# Every rule, on made-up outcomes of 200 images: what breaks it, and what just does not.


def outcome(wrong):
    """Of 200 images, the first so many percent misclassified."""
    target = np.zeros(200, dtype=np.int64)
    return {"target": target, "predicted": (np.arange(200) < 2 * wrong).astype(np.int64)}


def evidence(randomized=False, declared=False, task="classification", **damage):
    """All attacks do 40 points of damage at 2/255 and 60 at 8/255, but for those named."""
    usual = {
        "fgsm/8/255": 50,
        "pgd-ce-few/8/255": 60,
        "pgd-ce/2/255": 40,
        "pgd-ce/8/255": 60,
        "pgd-ce/unbounded": 100,
        "pgd-ce-single/8/255": 60,
        "pgd-margin/2/255": 40,
        "pgd-margin/8/255": 60,
        "pgd-margin/unbounded": 100,
        **{f"{kind}/8/255": 60 for kind in ("apgd-ce", "apgd-dlr", "apgd-targeted", "transfer", "square", "random")},
    }
    parts = {f"adaptive/{name}": outcome(value) for name, value in (usual | damage).items()}
    parts |= {"clean": outcome(10), "gradients": {"largest": np.full(200, 1e-3)}}
    parts |= {f"paper/{name}/8/255": outcome(55) for name in ("fgsm", "bim", "pgd")}
    return Evidence(task, parts, ("2/255", "8/255"), "8/255", declared, randomized)


def broken(found):
    return [check.name for check in audit(found).checks if check.passed is False]


def test_no_rule_is_broken_by_plausible_numbers():
    found = audit(evidence())
    assert not found.masked
    assert all(check.passed for check in found.checks)
    assert len({check.name for check in found.checks}) == 9
    assert "paper's attacks leave 45.0 % accuracy, the adaptive ensemble 40.0 %" in found.verdict
    assert "due to the stronger attacks" in found.verdict


@pytest.mark.parametrize(
    ("rule", "part", "fine", "bad"),
    [
        ("single step", "fgsm/8/255", 60 + SLACK, 62),
        ("more steps", "pgd-ce-few/8/255", 60 + SLACK, 62),
        ("black box", "square/8/255", 60 + SLACK, 62),
        ("black box", "random/8/255", 60 + SLACK, 62),
        ("transfer", "transfer/8/255", 60 + SLACK, 62),
        ("losses", "pgd-margin/8/255", 60 + LOSS_SLACK, 64),
    ],
)
def test_each_rule_breaks_on_its_own(rule, part, fine, bad):
    assert broken(evidence(**{part: fine})) == []
    assert broken(evidence(**{part: bad})) == [rule]


def test_a_larger_radius_that_helps_the_defender():
    fine, bad = ({"pgd-ce/2/255": value, "pgd-margin/2/255": value} for value in (60 + SLACK, 62))
    assert broken(evidence(**fine)) == []
    assert broken(evidence(**bad)) == ["larger radius"]


def test_the_allowance_of_few_images_is_said():
    """15 images, of which the cross-entropy leaves 10 and the margin loss 8: two more than 3 points would allow."""
    found = evidence(**{"pgd-ce/8/255": 33, "pgd-margin/8/255": 47})
    few = {name: {key: values[::14] for key, values in part.items()} for name, part in found.parts.items()}
    for count, said in ((15, "of so few images 2 (13.3 points) are allowed"), (200, None)):
        parts = few if count == 15 else found.parts
        check = {check.name: check for check in audit(replace(found, parts=parts)).checks}["losses"]
        assert len(parts["clean"]["target"]) == count
        assert check.passed is (count == 15)
        assert (said in check.finding) if said else ("so few" not in check.finding)


def test_an_unbounded_attack_must_reach_zero():
    left = {"pgd-ce/unbounded": 99 - UNBOUNDED_ACCURACY, "pgd-margin/unbounded": 99 - UNBOUNDED_ACCURACY}
    assert broken(evidence(**left)) == ["unbounded"]
    assert broken(evidence(**{"pgd-ce/unbounded": 70})) == []  # the margin loss gets there


def test_vanishing_gradients_are_counted():
    found = evidence()
    largest = np.full(200, 1e-3)
    largest[: int(2 * VANISHED_SHARE)] = 0
    found.parts["gradients"]["largest"] = largest
    assert broken(found) == []
    largest[: int(2 * VANISHED_SHARE) + 2] = 1e-30
    assert broken(found) == ["gradients"]


def test_randomness():
    assert broken(evidence(randomized=True, declared=True)) == []
    assert broken(evidence(randomized=True, declared=False)) == ["randomness"]
    hidden = {"pgd-ce-single/8/255": 60 - LOSS_SLACK - 1}
    assert broken(evidence(randomized=True, declared=True, **hidden)) == ["randomness"]


def test_a_masked_network_is_called_that_with_its_numbers():
    damage = dict.fromkeys(("pgd-margin/8/255", "apgd-dlr/8/255", "apgd-targeted/8/255"), 95)
    verdict = audit(evidence(**damage)).verdict
    assert verdict.startswith("GRADIENT MASKING: 1 of the 9 rules that were tried is broken (losses).")
    assert "leave 45.0 % accuracy, the adaptive ensemble 5.0 %: the difference of 40.0 points is not robust" in verdict


def test_what_was_not_run_is_not_claimed():
    found = evidence()
    for name in list(found.parts):
        if "transfer" in name or "unbounded" in name:
            del found.parts[name]
    states = {check.name: check.passed for check in audit(found).checks}
    assert states["transfer"] is None
    assert states["unbounded"] is None
    assert "all 7 rules that were tried hold" in audit(found).verdict


def test_where_no_attack_was_run_no_rule_was_tried():
    found = evidence(randomized=True, declared=True)
    for name in list(found.parts):
        if name != "clean":
            del found.parts[name]
    tried = [check.name for check in audit(found).checks if check.passed is not None]
    assert tried in ([], ["randomness"])


def test_a_regression_is_judged_by_its_error():
    def numbers(error):
        target = np.linspace(20, 80, 50)[:, None]
        return {"target": target, "output": target + error}

    names = ("pgd-absolute", "pgd-increase", "pgd-decrease", "apgd-absolute", "transfer", "square", "random")
    parts = {f"adaptive/{name}/8/255": numbers(10) for name in names}
    parts |= {"adaptive/fgsm/8/255": numbers(8), "adaptive/pgd-absolute-few/8/255": numbers(9)}
    parts |= {"adaptive/pgd-absolute/unbounded": numbers(50), "clean": numbers(3)}
    parts["gradients"] = {"largest": np.ones(50)}
    found = Evidence("regression", parts, ("8/255",), "8/255", False, False)
    assert broken(found) == []
    parts["adaptive/square/8/255"] = numbers(12)
    parts["adaptive/pgd-absolute/unbounded"] = numbers(11)
    assert broken(found) == ["unbounded", "black box"]
    assert "of predicting the mean" in audit(found).verdict
