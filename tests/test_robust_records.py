"""Records of evaluations: plans, outcomes, and every reported number recomputed from what is stored."""

from __future__ import annotations

import json
import math
from functools import partial
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import nn

import tensor_dropout as td
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.robustness.answers import Predicted
from tensor_dropout.robustness.describe import describe_outcome
from tensor_dropout.robustness.evaluation import evaluate
from tensor_dropout.robustness.noise import CORRUPTIONS
from tensor_dropout.robustness.outcomes import Outcomes
from tensor_dropout.robustness.protocol import CURVE_STRENGTHS, Budget, plan_attacks, plan_noise
from tensor_dropout.robustness.settings import Settings
from tensor_dropout.robustness.summary import summarize_evaluation, worst_outcome
from tensor_dropout.robustness.target import Target
from tensor_dropout_lab.data import StreamSplit, load_data
from tensor_dropout_lab.evaluation.compare import compare_outcomes
from tensor_dropout_lab.evaluation.examples import Examples, build_target, measure_scale, take_examples
from tensor_dropout_lab.evaluation.intervals import metric_interval
from tensor_dropout_lab.evaluation.runs import RunSettings, evaluate_run
from tensor_dropout_lab.evaluation.twin import fit_twin
from tensor_dropout_lab.record_store import read_outcomes
from training_runs import run

USUAL = tuple(Budget.parse(f"{strength}/255") for strength in (2, 8, 16))


# One example, one row.


def test_classes_are_described_as_computed_by_hand():
    probs = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.0, 1.0, 0.0]])
    found = describe_outcome(Predicted(probs, None), torch.tensor([0, 1, 0]), "classification")
    assert {name: values.shape for name, values in found.items()} == dict.fromkeys(
        ("predicted", "confidence", "rest", "nll", "brier", "entropy", "top5"), (3,)
    )
    assert found["predicted"].tolist() == [0, 2, 1]
    assert found["predicted"].dtype == np.int16
    np.testing.assert_allclose(found["confidence"], [0.7, 0.8, 1.0], rtol=1e-6)
    np.testing.assert_allclose(found["rest"], [0.3, 0.2, 0.0], rtol=1e-6, atol=1e-30)
    np.testing.assert_allclose(found["nll"][:2], [-math.log(0.7), -math.log(0.1)], rtol=1e-6)
    np.testing.assert_allclose(found["brier"], [0.14, 0.01 + 0.81 + 0.64, 2.0], rtol=1e-3)  # float16
    entropy = [-sum(p * math.log(p) for p in row) for row in ((0.7, 0.2, 0.1), (0.1, 0.1, 0.8))]
    np.testing.assert_allclose(found["entropy"], [*entropy, 0.0], rtol=1e-3, atol=1e-30)
    assert 80 < found["nll"][2] < 100  # a probability of 0 is a large number, not infinity


def test_many_classes_do_not_overflow():
    probs = torch.zeros(1, 40_000)
    probs[0, 39_999] = 1
    found = describe_outcome(Predicted(probs, None), torch.tensor([39_999]), "classification")
    assert found["predicted"].tolist() == [39_999]
    assert found["nll"].tolist() == [0]


def test_numbers_are_described_as_they_are():
    output, std = torch.tensor([[1.0], [2.0]], dtype=torch.float64), torch.tensor([[0.5], [0.0]])
    found = describe_outcome(Predicted(output, std), torch.tensor([1.0, 1.0]), "regression")
    assert {name: values.tolist() for name, values in found.items()} == {"output": [[1], [2]], "std": [[0.5], [0]]}
    assert list(describe_outcome(Predicted(output, None), torch.tensor([1.0, 1.0]), "regression")) == ["output"]


# The file.


def make_outcomes(path, identity=None):
    outcomes = Outcomes(path / "outcomes.npz", identity or {"networks": ["abc"], "examples": "1f", "samples": 1})
    outcomes.set_examples(torch.tensor([0, 1, 1]), ["a/1", "b", "ü"])
    return outcomes


def test_outcomes_come_back_from_the_file(tmp_path):
    outcomes = make_outcomes(tmp_path)
    assert not (tmp_path / "outcomes.npz").exists()
    arrays = {"predicted": np.array([0, 1, 0], np.int16), "confidence": np.array([0.5, 0.6, 0.7], np.float32)}
    outcomes.add("adaptive/pgd-ce/8/255", {"epsilon": 8 / 255, "after": ("x", "y")}, arrays, 1.23456)
    outcomes.add("adaptive/pgd-ce/0.1", {"epsilon": 0.1}, {"predicted": np.array([1, 1, 1], np.int16)}, 0.0)
    outcomes.add("validation", {}, {"extra_variance": np.array(2.5)}, 0.0)
    for again in (Outcomes(outcomes.path, outcomes.identity), read_outcomes(tmp_path)):
        assert again.names() == ["adaptive/pgd-ce/8/255", "adaptive/pgd-ce/0.1", "validation"]
        assert again.names("adaptive/") == again.names()[:2]
        assert again.examples["name"].tolist() == ["a/1", "b", "ü"]
        part = again["adaptive/pgd-ce/8/255"]
        assert list(part) == ["target", "predicted", "confidence"]
        assert part["target"].tolist() == [0, 1, 1]
        for name, values in arrays.items():
            assert part[name].dtype == values.dtype
            assert np.array_equal(part[name], values)
        assert again.settings("adaptive/pgd-ce/8/255") == {"epsilon": 8 / 255, "after": ["x", "y"], "seconds": 1.235}
        assert again["adaptive/pgd-ce/0.1"]["predicted"].tolist() == [1, 1, 1]
        assert float(again["validation"]["extra_variance"]) == 2.5
        assert "adaptive/pgd-ce/8/255" in again
        assert "adaptive/pgd-ce/8" not in again
    assert [path.name for path in tmp_path.iterdir()] == ["outcomes.npz"]


def test_a_part_is_done_only_with_the_same_settings(tmp_path):
    outcomes = make_outcomes(tmp_path)
    settings = {"attack": "pgd-ce", "epsilon": 8 / 255, "steps": 50, "after": ("a", "b"), "loss": None}
    outcomes.add("adaptive/pgd-ce/8/255", settings, {"predicted": np.zeros(3, np.int16)}, 1.0)
    for found in (outcomes, Outcomes(outcomes.path, outcomes.identity)):
        assert found.has("adaptive/pgd-ce/8/255", settings)
        assert found.has("adaptive/pgd-ce/8/255", {**settings, "after": ["a", "b"]})
        for change in ({"steps": 51}, {"epsilon": 8.0001 / 255}, {"after": ("b", "a")}, {"loss": "dlr"}, {"new": 1}):
            assert not found.has("adaptive/pgd-ce/8/255", {**settings, **change})
        assert not found.has("adaptive/pgd-ce/8/255", {key: settings[key] for key in list(settings)[1:]})
        assert not found.has("adaptive/pgd-ce/8", settings)
    outcomes.add("adaptive/pgd-ce/8/255", {**settings, "steps": 51}, {"predicted": np.ones(3, np.int16)}, 1.0)
    again = read_outcomes(tmp_path)
    assert again.names() == ["adaptive/pgd-ce/8/255"]
    assert again["adaptive/pgd-ce/8/255"]["predicted"].tolist() == [1, 1, 1]


def test_outcomes_of_something_else_are_refused(tmp_path):
    outcomes = make_outcomes(tmp_path)
    outcomes.add("clean", {}, {"predicted": np.zeros(3, np.int16)}, 0.0)
    for change in ({"networks": ["abd"]}, {"networks": ["abc", "abc"]}, {"examples": "20"}, {"samples": 2}, {"new": 1}):
        ((key, value),) = change.items()
        with pytest.raises(TensorDropoutError, match=rf"holds an evaluation with {key}=.*--out") as error:
            Outcomes(outcomes.path, {**outcomes.identity, **change})
        assert repr(value) in str(error.value)
        assert str(tmp_path) in str(error.value)
    assert Outcomes(outcomes.path, {**outcomes.identity, "networks": ("abc",)}).names() == ["clean"]
    with pytest.raises(TensorDropoutError, match=r"holds no evaluation.*tensor-dropout evaluate"):
        read_outcomes(tmp_path / "nowhere")


def test_evaluations_without_a_common_part_are_not_compared(tmp_path):
    first, second = (make_outcomes(tmp_path / name) for name in "ab")
    first.add("noise/blur/1/0", {}, {"predicted": np.zeros(3, np.int16)}, 0.0)
    second.add("gradients", {}, {"largest": np.ones(3)}, 0.0)
    first.add("gradients", {}, {"largest": np.ones(3)}, 0.0)
    with pytest.raises(TensorDropoutError, match="share no part"):
        compare_outcomes(first, second)


# Plans.


@pytest.mark.parametrize(
    ("text", "epsilon"), [("8/255", 8 / 255), ("0.03", 0.03), ("1", 1.0), ("1e-3", 1e-3), ("0.5/255", 0.5 / 255)]
)
def test_radii_are_read_as_written(text, epsilon):
    assert Budget.parse(text) == Budget(text, epsilon)


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "-8/255", "8/-255", "8/0", "0/255", "big", "8/big", "/255", "8/", "8/255/2", "nan", "inf"]
)
def test_what_is_no_radius(text):
    with pytest.raises(TensorDropoutError, match=r"positive number such as 8/255 or 0\.03") as error:
        Budget.parse(text)
    assert repr(text) in str(error.value)


def plan(protocol="both", task="classification", classes=10, budgets=USUAL, main="8/255", **options):
    return plan_attacks(protocol, task, classes, budgets, main=main, **options)


def test_the_papers_attacks_are_as_printed():
    parts = {part.name: part for part in plan("paper", seed=3)}
    strengths = {2: 3, 8: 10, 16: 20}  # λ: ceil(min(λ + 4, 1.25 λ)) steps
    expected = {f"paper/{name}/{strength}/255" for strength in strengths for name in ("fgsm", "bim", "pgd")}
    expected |= {f"paper/fgsm/{strength}e-3" for strength in (1, 2, 4, 8, 16, 32, 64, 128)}
    assert set(parts) == expected
    for strength, steps in strengths.items():
        one, walk, drawn = (parts[f"paper/{name}/{strength}/255"].attack for name in ("fgsm", "bim", "pgd"))
        assert (one.steps, walk.steps, drawn.steps) == (1, steps, steps)
        assert one.step == one.epsilon
        assert (walk.step, drawn.step) == (1 / 255, 1 / 255)
        assert (one.start, walk.start, drawn.start) == ("centre", "centre", "random")
        assert drawn.seed == 3
        assert [attack.epsilon for attack in (one, walk, drawn)] == pytest.approx([strength / 255] * 3)
    for strength in CURVE_STRENGTHS:
        assert parts[f"paper/fgsm/{strength}e-3"].epsilon == pytest.approx(strength * 1e-3)
        assert parts[f"paper/fgsm/{strength}e-3"].attack.steps == 1
    for part in parts.values():
        assert (part.attack.norm, part.attack.loss, part.attack.keep) == ("linf", "cross_entropy", "last")
        assert (part.averaged, part.after) == (False, ())
        assert part.epsilon == part.attack.epsilon


def test_the_paper_stays_in_the_maximum_norm_and_takes_further_radii():
    parts = {part.name: part for part in plan("paper", budgets=(Budget.parse("0.1"),), main="0.1", norm="l2")}
    assert len(parts) == 3 * 3 + 8  # a Euclidean radius means nothing there
    parts = {part.name: part for part in plan("paper", budgets=(Budget.parse("0.1"),), main="0.1")}
    assert len(parts) == 3 * 4 + 8
    assert {part.attack.norm for part in parts.values()} == {"linf"}
    assert parts["paper/bim/0.1"].attack.steps == math.ceil(25.5 + 4)
    assert {part.attack.loss for part in plan("paper", "regression", 1)} == {"absolute"}
    assert plan("none") == []


ENSEMBLE = ["pgd-ce", "pgd-margin", "apgd-ce", "apgd-dlr", "apgd-targeted", "transfer", "square", "random"]
ENSEMBLE_OF_NUMBERS = [
    "pgd-absolute",
    "pgd-increase",
    "pgd-decrease",
    "apgd-absolute",
    "transfer",
    "square",
    "random",
]


def test_the_adaptive_parts_and_what_they_come_after():
    parts = {part.name: part for part in plan("adaptive", steps=40, queries=500, unbounded=1.0)}
    expected = {f"adaptive/{kind}/{budget.label}" for kind in ENSEMBLE for budget in USUAL}
    expected |= {f"adaptive/{kind}/unbounded" for kind in ("pgd-ce", "pgd-margin")}
    expected |= {"adaptive/fgsm/8/255", "adaptive/pgd-ce-few/8/255"}
    assert set(parts) == expected
    for budget in USUAL:
        for k, kind in enumerate(ENSEMBLE):
            part = parts[f"adaptive/{kind}/{budget.label}"]
            before = [f"adaptive/{earlier}/{budget.label}" for earlier in ENSEMBLE[:k]]
            assert list(part.after) == (before if k >= 2 else [])
            assert part.epsilon == budget.epsilon
            assert part.averaged
    main = {kind: parts[f"adaptive/{kind}/8/255"].attack for kind in ENSEMBLE}
    assert [kind for kind in ENSEMBLE if parts[f"adaptive/{kind}/8/255"].transferred] == ["transfer"]
    assert [main[kind].steps for kind in ENSEMBLE[:5]] == [40] * 5
    assert (main["square"].queries, main["random"].queries) == (500, 50)
    assert [main[kind].loss for kind in ENSEMBLE[:5]] == [
        "cross_entropy",
        "margin",
        "cross_entropy",
        "dlr",
        "targeted_dlr",
    ]
    assert main["pgd-ce"].keep == "best"
    assert parts["adaptive/pgd-ce-few/8/255"].attack.steps == 8
    assert parts["adaptive/pgd-ce/unbounded"].epsilon == 1.0


def test_every_part_comes_after_what_it_builds_on():
    for options in ({}, {"norm": "l2"}, {"task": "regression", "classes": 1}, {"randomized": True}):
        names = []
        for part in plan("both", **options):
            assert set(part.after) <= set(names), part.name
            assert part.name not in names
            names.append(part.name)


def test_a_random_network_is_also_attacked_with_single_draws():
    parts = {part.name: part for part in plan("adaptive", randomized=True)}
    single = parts["adaptive/pgd-ce-single/8/255"]
    assert not single.averaged
    assert single.attack == parts["adaptive/pgd-ce/8/255"].attack
    assert len(parts) == len(plan("adaptive")) + 1


@pytest.mark.parametrize(
    ("classes", "losses"),
    [(2, ("margin", "targeted_margin")), (3, ("dlr", "targeted_margin")), (4, ("dlr", "targeted_dlr"))],
)
def test_few_classes_have_losses_that_fit(classes, losses):
    parts = {part.name: part for part in plan("adaptive", classes=classes)}
    assert (parts["adaptive/apgd-dlr/8/255"].attack.loss, parts["adaptive/apgd-targeted/8/255"].attack.loss) == losses


def test_the_adaptive_parts_of_numbers():
    parts = {part.name: part for part in plan("adaptive", "regression", 1)}
    expected = {f"adaptive/{kind}/{budget.label}" for kind in ENSEMBLE_OF_NUMBERS for budget in USUAL}
    expected |= {f"adaptive/{kind}/unbounded" for kind in ENSEMBLE_OF_NUMBERS[:3]}
    expected |= {"adaptive/fgsm/8/255", "adaptive/pgd-absolute-few/8/255"}
    assert set(parts) == expected
    losses = {name.split("/")[1]: part.attack.loss for name, part in parts.items() if hasattr(part.attack, "loss")}
    assert losses["pgd-absolute"] == losses["apgd-absolute"] == losses["fgsm"] == "absolute"
    assert (losses["pgd-increase"], losses["pgd-decrease"]) == ("increase", "decrease")


def test_euclidean_plans_have_no_square():
    parts = plan("adaptive", norm="l2", unbounded=8.0)
    assert not [part for part in parts if "/square/" in part.name]
    assert {part.attack.norm for part in parts if part.attack is not None} == {"l2"}
    assert {part.epsilon for part in parts if part.name.endswith("unbounded")} == {8.0}


@pytest.mark.parametrize("strength", CURVE_STRENGTHS)
def test_a_radius_of_the_curve_is_one_part(strength):
    """Two parts of one name with different settings would be run again and again."""
    label = f"{strength}e-3"
    settings = {}
    for part in plan("both", budgets=(Budget.parse(label),), main=label):
        assert settings.setdefault(part.name, part.settings()) == part.settings()


def test_settings_of_a_part_say_what_it_depends_on():
    for changed in ({"steps": 7}, {"seed": 1}, {"norm": "l2"}):
        before = {part.name: part for part in plan("adaptive", budgets=USUAL[1:2], steps=5)}
        after = {part.name: part for part in plan("adaptive", budgets=USUAL[1:2], **{"steps": 5, **changed})}
        for name in ("adaptive/pgd-ce/8/255", "adaptive/apgd-dlr/8/255"):
            assert before[name].settings() != after[name].settings()
            assert json.loads(json.dumps(before[name].settings())) == before[name].settings()


def test_noise_is_drawn_as_often_as_asked_if_it_is_random():
    parts = plan_noise(["gaussian", "blur"], 3)
    gaussian = [f"noise/gaussian/{level:g}/{draw}" for level in CORRUPTIONS["gaussian"].levels for draw in range(3)]
    blur = [f"noise/blur/{level:g}/0" for level in CORRUPTIONS["blur"].levels]
    assert [part.name for part in parts] == gaussian + blur
    assert parts[4].settings() == {"corruption": "gaussian", "level": 8.0, "draw": 1}
    assert plan_noise([], 3) == []
    with pytest.raises(TensorDropoutError, match=r"no noise 'rain'; known are gaussian"):
        plan_noise(["rain"], 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"protocol": "strong"}, "protocol is 'paper'"),
        ({"budgets": ()}, "different radii are expected, got none"),
        ({"budgets": (USUAL[0], USUAL[0])}, "different radii"),
        ({"budgets": (Budget("1/2", 0.5), Budget("0.5", 0.5))}, "different radii"),
        ({"main": "4/255"}, "main radius is one of 2/255, 8/255, 16/255, got '4/255'"),
    ],
)
def test_settings_are_checked(options, message):
    with pytest.raises(TensorDropoutError, match=message):
        Settings(**options)


def test_radii_are_ordered_and_the_middle_one_is_the_main_one():
    settings = Settings(budgets=(USUAL[2], USUAL[0], USUAL[1]))
    assert settings.ordered() == USUAL
    assert settings.main_label() == "8/255"
    assert Settings().budgets == USUAL
    assert Settings(budgets=(USUAL[2], USUAL[0]), main="2/255").main_label() == "2/255"


# From data sets to examples.


def test_examples_are_chosen_by_the_seed_alone():
    data = load_data("digits")
    scale = measure_scale(data)
    before = torch.get_rng_state()
    first = take_examples(data.test, scale, count=20, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    again = take_examples(data.test, scale, count=20, seed=5)
    assert first.names == again.names
    assert torch.equal(first.x, again.x)
    assert torch.equal(first.y, again.y)
    assert take_examples(data.test, scale, count=20, seed=6).names != first.names
    assert len(set(first.names)) == 20
    for k, name in enumerate(first.names):
        row = data.test.names.index(name)
        assert torch.equal(first.x[k], data.test.inputs[row].float() / 16)
        assert first.y[k] == data.test.targets[row]


def test_examples_lie_between_0_and_1_and_all_may_be_taken():
    data = load_data("digits")
    for count in (None, 360, 5000):
        whole = take_examples(data.test, measure_scale(data), count=count)
        assert whole.names == data.test.names
    assert (float(whole.x.min()), float(whole.x.max())) == (0.0, 1.0)
    assert whole.x.dtype == torch.float32


def test_unbounded_inputs_are_measured_in_their_spread():
    data = load_data("synthetic", shape=(2, 8, 8), rank=2, n=200)
    data.train.inputs.mul_(7)
    data.test.inputs.mul_(7)
    scale = measure_scale(data)
    assert not scale.bounded
    assert scale.width == pytest.approx(float(data.train.inputs[:64].std()))
    few = take_examples(data.test, scale, count=10)
    rows = [data.test.names.index(name) for name in few.names]
    torch.testing.assert_close(few.x * scale.width, data.test.inputs[rows])
    assert 0.9 < float(few.x.std()) < 1.1
    net = nn.Sequential(nn.Flatten(), nn.Linear(128, 1))
    target = build_target(net, data, scale)
    assert target.bounds == (-math.inf, math.inf)
    torch.testing.assert_close(target.predict(few.x).output, net(data.test.inputs[rows]), atol=1e-5, rtol=1e-4)


def test_a_target_takes_inputs_back_to_stored_units():
    data = load_data("digits")
    scale = measure_scale(data)
    few = take_examples(data.test, scale, count=10)
    rows = [data.test.names.index(name) for name in few.names]
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()
    found = build_target(net, data, scale).predict(few.x).output
    expected = net(data.prepare(data.test.inputs[rows]).double()).softmax(1)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_pictures_are_read_one_by_one(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    random = np.random.default_rng(0)
    for part, n in (("train", 3), ("val", 4)):
        for label in ("a", "b"):
            (tmp_path / part / label).mkdir(parents=True)
            for k in range(n):
                pixels = random.integers(0, 256, (20, 20, 3), dtype=np.uint8)
                image.fromarray(pixels).save(tmp_path / part / label / f"{label}{k}.png")
    data = load_data("imagefolder", root=tmp_path, size=16, resize=16, validation=0)
    assert isinstance(data.test, StreamSplit)
    few = take_examples(data.test, measure_scale(data), count=5, seed=2)
    assert few.names == take_examples(data.test, measure_scale(data), count=5, seed=2).names
    for k, name in enumerate(few.names):
        row = data.test.names.index(name)
        assert torch.equal(few.x[k], data.test.read(row).float() / 255)
        assert few.y[k] == data.test.targets[row]
    assert 0 <= float(few.x.min()) < float(few.x.max()) <= 1


def test_scans_are_streamed_in_units_of_their_spread(tmp_path):
    nibabel = pytest.importorskip("nibabel", reason="needs nibabel")
    random = np.random.default_rng(0)
    for k in range(12):
        volume = random.normal(100, 20, (8, 9, 8)).astype(np.float32)
        nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), tmp_path / f"sub-{k:02d}_T1w.nii.gz")
    lines = ["participant_id\tage", *(f"sub-{k:02d}\t{20 + k}" for k in range(12))]
    (tmp_path / "participants.tsv").write_text("\n".join(lines) + "\n")
    data = load_data("nifti", root=tmp_path, memory=0, validation=3, test=4)
    assert isinstance(data.test, StreamSplit)
    scale = measure_scale(data)
    train = torch.stack([data.train.read(k).float() for k in range(len(data.train))])
    assert (scale.bounded, scale.low) == (False, 0.0)
    assert scale.width == pytest.approx(float(train.std()))
    few = take_examples(data.test, scale, count=3, seed=1)
    for k, name in enumerate(few.names):
        row = data.test.names.index(name)
        torch.testing.assert_close(few.x[k] * scale.width, data.test.read(row).float())
        assert few.y[k] == data.test.targets[row] == 20 + int(name.split("sub-")[-1][:2])


# An evaluation: the same again, and nothing outside is touched.


def build_net(kind, outputs=4):
    """A small network on 1×6×6 inputs, always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "dropout":
            layers = [nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, outputs)]
        else:
            head = td.CPRegression((3, 4, 4), outputs, rank=5, init="normal", dropout=0.7)
            layers = [nn.Conv2d(1, 3, 3), nn.ReLU(), head]
        return nn.Sequential(*layers)


def draw_examples(outputs=4, task="classification", n=8):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(n, 1, 6, 6, generator=generator)
    y = torch.randint(outputs, (n,), generator=generator)
    return Examples(x, y if task == "classification" else y.float(), [f"example-{k}" for k in range(n)])


QUICK = Settings("adaptive", (Budget.parse("0.1"),), noise=("gaussian",), repeats=1, steps=3, queries=10)


def run_evaluation(folder, target, settings=QUICK):
    """Evaluate with a twin, and fit the residual variance of numbers on the same examples; the outcomes."""
    outputs = 4 if target.task == "classification" else 1
    examples = draw_examples(outputs, target.task)
    outcomes = Outcomes(folder / "outcomes.npz", {})
    twin = Target(build_net("dropout", outputs), task=target.task)
    evaluate(target, *examples[:2], settings, outcomes=outcomes, twin=twin, validation=lambda: examples[:2])
    return read_outcomes(folder)


def assert_equal_outcomes(found, expected):
    assert set(found.names()) == set(expected.names())
    differing = []
    for name in expected.names():
        ours, theirs = found[name], expected[name]
        assert ours.keys() == theirs.keys()
        differing += [f"{name}/{key}" for key in ours if not np.array_equal(ours[key], theirs[key])]
    assert differing == []


CASES = [
    ("tensor", "classification", "mean"),
    ("tensor", "classification", "exact"),
    ("tensor", "classification", "sample"),
    ("dropout", "classification", "sample"),
    ("tensor", "regression", "mean"),
    ("tensor", "regression", "exact"),
    ("tensor", "regression", "sample"),
]


def build_target_of(kind, task, mode):
    net = build_net(kind, 4 if task == "classification" else 1)
    return Target(net, task=task, mode=mode, n_samples=4 if mode != "mean" else None)


@pytest.mark.parametrize(("kind", "task", "mode"), CASES)
def test_the_same_evaluation_gives_the_same_arrays(tmp_path, kind, task, mode):
    found = []
    for folder, state in (("first", 11), ("second", 22)):
        torch.manual_seed(state)  # what else a program drew must not matter
        found.append(run_evaluation(tmp_path / folder, build_target_of(kind, task, mode)))
    assert_equal_outcomes(*found)


@pytest.mark.parametrize(("kind", "task", "mode"), CASES)
def test_the_random_numbers_of_others_are_left_alone(tmp_path, kind, task, mode):
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    run_evaluation(tmp_path, build_target_of(kind, task, mode))
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)


def test_a_twin_is_trained_when_none_is_given(tmp_path):
    """From unlabelled inputs, by the seed, and without a trace in the random numbers of others."""
    more = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    net = nn.Sequential(nn.Conv2d(1, 3, 5), build_net("tensor")[2])
    examples = Examples(more[:6], torch.arange(6) % 4, list("abcdef"))
    settings, found = Settings(**{**vars(QUICK), "noise": ()}), []
    for folder, state in (("first", 11), ("second", 22)):
        torch.manual_seed(state)
        before = torch.get_rng_state()
        outcomes = Outcomes(tmp_path / folder / "outcomes.npz", {})
        target = Target(net)
        twin = partial(fit_twin, target, more, epochs=1)
        evaluate(target, *examples[:2], settings, names=examples.names, outcomes=outcomes, twin=twin)
        assert torch.equal(torch.get_rng_state(), before)
        found.append(outcomes)
    assert "adaptive/transfer/0.1" in found[0]
    assert_equal_outcomes(*found)


def test_the_residual_variance_is_the_likeliest(tmp_path):
    outcomes = run_evaluation(tmp_path, build_target_of("tensor", "regression", "exact"))
    clean = outcomes["clean"]  # the residual variance was fitted on the same examples
    error, std = clean["output"][:, 0].astype(float) - clean["target"], clean["std"][:, 0].astype(float)

    def measure(extra):
        variance = std**2 + extra
        return float(np.mean(-0.5 * np.log(variance) - error**2 / (2 * variance)))

    best = float(outcomes["validation"]["extra_variance"])
    assert best > 0
    assert all(measure(extra) <= measure(best) + 1e-12 for extra in (0, *np.geomspace(1e-4, 1e4, 2000)))


def test_the_network_is_left_as_it_was(tmp_path):
    net = build_net("tensor").train()
    weights = {name: values.clone() for name, values in net.state_dict().items()}
    run_evaluation(tmp_path, Target(net, mode="sample", n_samples=2), Settings(**{**vars(QUICK), "noise": ()}))
    assert net.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in net.parameters())
    assert all(torch.equal(values, weights[name]) for name, values in net.state_dict().items())


def test_another_seed_in_the_same_file_is_another_evaluation(tmp_path):
    """Everything random follows the seed, also the draws of the network itself."""
    first, other = (Settings(**{**vars(QUICK), "noise": (), "seed": seed}) for seed in (0, 5))

    def target():
        return Target(build_net("tensor"), mode="sample", n_samples=4)

    run_evaluation(tmp_path / "reused", target(), first)
    torch.manual_seed(0)
    reused = run_evaluation(tmp_path / "reused", target(), other)
    torch.manual_seed(0)
    assert_equal_outcomes(reused, run_evaluation(tmp_path / "fresh", target(), other))


CHANGED = {
    "weights": lambda net, x, y: (Target(build_net("tensor").requires_grad_(False).apply(shift)), x, y),
    "dropout": lambda net, x, y: (Target(nn.Sequential(*net[:2], other_dropout(net[2]))), x, y),
    "members": lambda net, x, y: (Target([net, net]), x, y),
    "mode": lambda net, x, y: (Target(net, mode="sample", n_samples=1), x, y),
    "samples": lambda net, x, y: (Target(net, n_samples=2), x, y),
    "bounds": lambda net, x, y: (Target(net, bounds=(-1, 2)), x, y),
    "inputs": lambda net, x, y: (Target(net), x.flip(-1), y),
    "targets": lambda net, x, y: (Target(net), x, (y + 1) % 4),
}


def shift(module):
    if isinstance(module, nn.Conv2d):
        module.bias += 1e-6


def other_dropout(head):
    dropout = td.TensorDropout(0.7, scaling="paper")
    other = td.CPRegression((3, 4, 4), 4, rank=5, init="normal", dropout=dropout)
    other.load_state_dict(head.state_dict())
    return other


@pytest.mark.parametrize("change", CHANGED)
def test_outcomes_of_another_network_or_of_other_inputs_are_not_gone_on_with(tmp_path, change):
    """Whether they were read from the file, or are still in memory."""
    (x, y, _), settings = draw_examples(), Settings("none", noise=("blur",), repeats=1)
    outcomes = Outcomes(tmp_path / "outcomes.npz")
    evaluate(Target(build_net("tensor")), x, y, settings, outcomes=outcomes)
    before = outcomes.path.read_bytes()
    for found in (Outcomes(outcomes.path), outcomes, read_outcomes(tmp_path)):
        target, *examples = CHANGED[change](build_net("tensor"), x, y)
        with pytest.raises(TensorDropoutError, match=r"another network.*name another file") as error:
            evaluate(target, *examples, settings, outcomes=found)
        assert str(outcomes.path) in str(error.value)
    assert outcomes.path.read_bytes() == before


def test_outcomes_of_the_same_network_are_gone_on_with(tmp_path, monkeypatch):
    """Also built anew; those of a caller who says what they belong to are left to that caller."""
    (x, y, _), settings = draw_examples(), Settings("none", noise=("blur",), repeats=1)
    for identity in ({}, {"networks": ["abc"]}):
        path = tmp_path / str(len(identity)) / "outcomes.npz"
        evaluate(Target(build_net("tensor")), x, y, settings, outcomes=Outcomes(path, identity))
        assert list(Outcomes(path).header()["identity"]) == list(identity or ["fingerprint"])
        with monkeypatch.context() as patch:
            patch.setattr(Outcomes, "add", lambda *_: pytest.fail("run again"))
            report = evaluate(Target(build_net("tensor").train()), x, y, settings, outcomes=Outcomes(path, identity))
        assert "clean" in report.parts


def test_outcomes_that_do_not_say_whose_they_are_are_refused(tmp_path):
    """As 0.1.0 wrote them."""
    x, y, names = draw_examples()
    outcomes = Outcomes(tmp_path / "outcomes.npz")
    outcomes.set_examples(y, names)
    outcomes.add("clean", {"seed": 0}, {"predicted": np.zeros(8, np.int16)}, 1.0)
    with pytest.raises(TensorDropoutError, match="name another file"):
        evaluate(Target(build_net("tensor")), x, y, QUICK, outcomes=Outcomes(outcomes.path))


@pytest.mark.parametrize("classes", [2, 3, 4])
def test_few_classes_are_evaluated(tmp_path, classes):
    outcomes, examples = Outcomes(tmp_path / "outcomes.npz", {}), draw_examples(classes)
    twin = Target(build_net("dropout", classes))
    evaluate(Target(build_net("tensor", classes)), *examples[:2], QUICK, outcomes=outcomes, twin=twin)
    assert {f"adaptive/{kind}/0.1" for kind in ENSEMBLE} <= set(outcomes.names())


def test_who_is_wrong_from_the_start_is_not_attacked_again(tmp_path):
    """All labels are wrong: the ensemble has nobody left, and its parts repeat the first one's outcome."""
    net, examples = build_net("tensor"), draw_examples()
    target = Target(net)
    wrong = (target.predict(examples.x).output.argmax(1) + 1) % 4
    outcomes = Outcomes(tmp_path / "outcomes.npz", {})
    evaluate(target, examples.x, wrong, QUICK, outcomes=outcomes, twin=Target(build_net("dropout")))
    for kind in ENSEMBLE[2:]:
        for key, values in outcomes[f"adaptive/{kind}/0.1"].items():
            assert np.array_equal(values, outcomes["adaptive/pgd-ce/0.1"][key])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.full((8, 1, 6, 6), 2.0)}, "outside the bounds"),
        ({"x": torch.full((8, 1, 6, 6), math.nan)}, "target: an input is not finite"),
        ({"y": torch.full((8,), 4)}, r"labels lie in 4\.\.4, the network has the classes 0\.\.3"),
        ({"y": torch.full((8,), -1)}, "labels lie in -1"),
        ({"y": torch.zeros(7, dtype=torch.int64)}, "8 inputs need as many targets"),
    ],
)
def test_examples_that_do_not_fit_give_no_number(tmp_path, change, message):
    examples = draw_examples()._replace(**change)
    with pytest.raises(TensorDropoutError, match=message):
        evaluate(Target(build_net("tensor")), *examples[:2], QUICK, outcomes=Outcomes(tmp_path / "outcomes.npz", {}))
    assert list(tmp_path.iterdir()) == []


def test_a_network_that_returns_nan_for_one_example_gives_no_number(tmp_path):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = build_net("tensor")

        def forward(self, x):
            return torch.where(x.mean((1, 2, 3), keepdim=True)[:, :, 0, 0] > 0.52, math.nan, self.net(x))

    examples = draw_examples()
    bad = examples.x.mean((1, 2, 3)) > 0.52
    assert 0 < int(bad.sum()) < 8
    assert not bad[0]
    with pytest.raises(TensorDropoutError, match="NaN or infinity"):
        evaluate(Target(Broken()), *examples[:2], QUICK, outcomes=Outcomes(tmp_path / "outcomes.npz", {}))
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_with_a_twin_of_0_1_0_is_not_gone_on_with(tmp_path):
    """It trained its twin in another way: a record never has attacks from both."""
    run(tmp_path / "run", run__epochs=1)
    settings = RunSettings("none", noise=(), twin_epochs=3)
    _, outcomes, folder = evaluate_run(tmp_path / "run", settings, images=8, device="cpu")
    path = folder / "outcomes.npz"
    old = Outcomes(None, {**outcomes.identity, "twin": "trained, 3 epochs"})
    old.path = path
    old.set_examples(torch.from_numpy(outcomes.examples["target"]), outcomes.examples["name"].tolist())
    old.add("clean", {}, {"predicted": np.zeros(8, np.int16)}, 1.0)
    with pytest.raises(TensorDropoutError, match=r"twin='trained, 3 epochs'.*choose another folder"):
        evaluate_run(tmp_path / "run", settings, images=8, device="cpu")


# Every number of a record, from the arrays, with numpy alone.


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A record of classes and one of numbers, as written, with the arrays of their outcomes."""
    root = tmp_path_factory.mktemp("recorded")
    run(root / "classes", run__epochs=3)
    options = {"shape": [1, 8, 8], "n": 150, "rank": 2}
    run(root / "numbers", data__name="synthetic", data__options=options, run__epochs=2, run__batch=20)
    settings = RunSettings(
        budgets=(Budget.parse("8/255"), Budget.parse("0.1")),
        main="0.1",
        noise=("gaussian", "blur"),
        repeats=2,
        steps=5,
        queries=20,
    )
    found = {}
    for name, mode in (("classes", "mean"), ("numbers", "exact")):
        _, outcomes, folder = evaluate_run(root / name, settings, images=40, mode=mode, twin=root / name, device="cpu")
        record = json.loads((folder / "evaluation.json").read_text(), parse_constant=pytest.fail)
        with np.load(folder / "outcomes.npz") as file:
            arrays = {key: file[key] for key in file.files}
        header = json.loads(str(arrays.pop("header")))
        found[name] = (record["summary"], arrays, header["parts"])
        assert outcomes.names() == list(header["parts"])
    return found


def wilson(right):
    n, p, z = len(right), right.mean(), NormalDist().inv_cdf(0.975)
    centre, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return 100 * (centre - half) / (1 + z**2 / n), 100 * (centre + half) / (1 + z**2 / n)


def selective_risk(certainty, loss):
    """The mean over k of the mean loss of the k most certain; equals share their loss."""
    loss = np.array([loss[certainty == own].mean() for own in certainty])
    ordered = loss[np.argsort(-certainty, kind="stable")]
    return np.mean([ordered[:k].mean() for k in range(1, len(loss) + 1)])


def measure_classes(arrays, part):
    own = {key: arrays[f"{part}/{key}"].astype(float) for key in ("predicted", "confidence", "nll", "brier")}
    right = own["predicted"] == arrays["target"]
    error = 0.0
    for k in range(15):
        inside = (own["confidence"] * 15 // 1).clip(0, 14) == k
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - own["confidence"][inside].mean())
    return {
        "accuracy": 100 * right.mean(),
        "nll": own["nll"].mean(),
        "ece": 100 * error,
        "brier": own["brier"].mean(),
        "aurc": 100 * selective_risk(own["confidence"], 1.0 - right),
    }


def measure_numbers(arrays, part, extra=None):
    target = arrays["target"].astype(float)
    output, std = (arrays[f"{part}/{key}"][:, 0].astype(float) for key in ("output", "std"))
    error, end = np.abs(output - target), ""
    found = {
        "mae": error.mean(),
        "rmse": math.sqrt((error**2).mean()),
        "width_95": 2 * 1.959963984540054 * std.mean(),
        "aurc": selective_risk(-std, error),
        "zero_std": 100 * (std == 0).mean(),
    }
    if extra is not None:
        found, std, end = {}, np.sqrt(std**2 + extra), "_widened"
    found[f"nll{end}"] = np.mean(0.5 * np.log(2 * np.pi * std**2) + error**2 / (2 * std**2))
    for level, z in (
        (50, 0.6744897501960817),
        (80, 1.2815515655446004),
        (90, 1.6448536269514722),
        (95, 1.959963984540054),
    ):
        found[f"coverage_{level}{end}"] = 100 * (error <= z * std).mean()
    return found


def assert_row(row, expected):
    for key, value in expected.items():
        assert row[key] == pytest.approx(value, rel=1e-6, abs=1e-9), key


def list_parts(parts, prefix):
    return [name for name in parts if name.startswith(prefix)]


def test_every_accuracy_is_recomputed(recorded):
    summary, arrays, parts = recorded["classes"]
    assert summary["examples"] == len(arrays["target"]) == 40
    assert_row(summary["clean"], measure_classes(arrays, "clean"))
    assert summary["clean"]["draws"] == 1
    names = [*list_parts(parts, "paper/"), *list_parts(parts, "adaptive/")]
    for name, row in zip(["clean", *names], [summary["clean"], *summary["attacks"]], strict=True):
        right = arrays[f"{name}/predicted"] == arrays["target"]
        assert row["accuracy"] == pytest.approx(100 * right.mean())
        assert (row["low"], row["high"]) == pytest.approx(wilson(right))
    for name, row in zip(names, summary["attacks"], strict=True):
        assert f"{row['protocol']}/{row['attack']}/{row['budget']}" == name
        assert row["epsilon"] == parts[name]["settings"]["epsilon"]
        assert row["seconds"] == parts[name]["seconds"]
        assert row["cumulative"] == bool(parts[name]["settings"]["after"])
    assert {row["accuracy"] for row in summary["attacks"]} != {summary["clean"]["accuracy"]}


def test_the_confidence_under_attack_is_recomputed(recorded):
    summary, arrays, _ = recorded["classes"]
    for row in summary["attacks"]:
        stored = arrays[f"{row['protocol']}/{row['attack']}/{row['budget']}/confidence"]
        assert row["confidence"] == pytest.approx(100 * stored.astype(float).mean(), rel=1e-6)


def test_every_error_is_recomputed(recorded):
    summary, arrays, parts = recorded["numbers"]
    extra = float(arrays["validation/extra_variance"])
    assert_row(summary["clean"], measure_numbers(arrays, "clean"))
    assert_row(summary["clean"], measure_numbers(arrays, "clean", extra))
    assert extra > 0
    assert summary["clean"]["coverage_95_widened"] > summary["clean"]["coverage_95"]
    names = [*list_parts(parts, "paper/"), *list_parts(parts, "adaptive/")]
    random = np.random.default_rng(4)
    for name, row in zip(["clean", *names], [summary["clean"], *summary["attacks"]], strict=True):
        errors = score(arrays, name, "numbers")
        assert row["mae"] == pytest.approx(errors.mean())
        ends = np.quantile(random.choice(errors, (3000, len(errors))).mean(1), (0.025, 0.975))
        assert (row["low"], row["high"]) == pytest.approx(ends, abs=0.1 * (ends[1] - ends[0]))
        assert not row.get("cumulative", False)


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_noise_is_averaged_over_draws(recorded, kind):
    summary, arrays, parts = recorded[kind]
    assert [(row["corruption"], row["level"]) for row in summary["noise"]] == [
        (name, level) for name in ("gaussian", "blur") for level in CORRUPTIONS[name].levels
    ]
    measure = measure_classes if kind == "classes" else measure_numbers
    random = np.random.default_rng(3)
    for row in summary["noise"]:
        names = list_parts(parts, f"noise/{row['corruption']}/{row['level']:g}/")
        assert row["draws"] == len(names) == (2 if row["corruption"] == "gaussian" else 1)
        found = [measure(arrays, name) for name in names]
        assert_row(row, {key: np.mean([each[key] for each in found]) for key in found[0]})
        scores = np.stack([score(arrays, name, kind) for name in names])
        if kind == "classes" and len(names) == 1:
            expected, slack = wilson(scores[0] > 0), 1e-6
        else:  # draws and images with replacement
            draws, images = scores.shape
            picks = ((random.integers(draws, size=draws), random.integers(images, size=images)) for _ in range(3000))
            expected = np.quantile([scores[np.ix_(*pick)].mean() for pick in picks], (0.025, 0.975))
            slack = 0.35 * (expected[1] - expected[0]) / 2
        assert (row["low"], row["high"]) == pytest.approx(expected, abs=slack)
    if kind == "classes":
        first, second = (arrays[f"noise/gaussian/1/{draw}/nll"] for draw in (0, 1))
        assert not np.array_equal(first, second)


def score(arrays, name, kind):
    """100 or 0 for right or wrong, or the absolute error."""
    if kind == "classes":
        return 100.0 * (arrays[f"{name}/predicted"] == arrays["target"])
    return np.abs(arrays[f"{name}/output"][:, 0].astype(float) - arrays["target"])


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_the_worst_case_is_the_worst_attack_on_every_single_example(recorded, kind):
    summary, arrays, parts = recorded[kind]
    metric, worst = ("accuracy", np.min) if kind == "classes" else ("mae", np.max)
    own = ENSEMBLE if kind == "classes" else ENSEMBLE_OF_NUMBERS
    assert [row["budget"] for row in summary["worst_case"]] == ["8/255", "0.1"]
    for row in summary["worst_case"]:
        for protocol, kinds in (("paper", ("fgsm", "bim", "pgd")), ("adaptive", own)):
            names = [f"{protocol}/{name}/{row['budget']}" for name in kinds]
            assert set(names) <= set(parts)
            scores = worst([score(arrays, name, kind) for name in names], axis=0)
            assert row[protocol][metric] == pytest.approx(scores.mean())
            if kind == "classes":
                assert (row[protocol]["low"], row[protocol]["high"]) == pytest.approx(wilson(scores > 0))
            else:
                assert row[protocol]["low"] <= row[protocol][metric] <= row[protocol]["high"]


def test_an_example_fooled_by_an_earlier_part_stays_fooled(recorded):
    _, arrays, parts = recorded["classes"]
    keys = ("predicted", "confidence")
    checked = 0
    for name, stored in parts.items():
        before = stored["settings"].get("after", [])
        for k in range(40):
            fooling = [part for part in before if arrays[f"{part}/predicted"][k] != arrays["target"][k]]
            if fooling:
                checked += 1
                assert [arrays[f"{name}/{key}"][k] for key in keys] == [
                    arrays[f"{fooling[0]}/{key}"][k] for key in keys
                ]
    assert checked > 100


def test_the_audit_is_recomputed(recorded):
    summary, arrays, _ = recorded["classes"]
    wrong = {
        name.removesuffix("/predicted"): 100.0 * (values != arrays["target"])
        for name, values in arrays.items()
        if name.endswith("/predicted")
    }
    radii = ("8/255", "0.1")

    def rise(kinds):
        gains = []
        for radius in radii:
            old = np.max([wrong[f"adaptive/{kind}/{radius}"] for kind in ENSEMBLE[:5]], axis=0)
            new = np.max([old, *(wrong[f"adaptive/{kind}/{radius}"] for kind in kinds)], axis=0)
            gains.append((new - old).mean())
        return max(gains)

    chain = [wrong[f"adaptive/pgd-ce/{radius}"].mean() for radius in (*radii, "unbounded")]
    either = [wrong[f"adaptive/{kind}/unbounded"] for kind in ("pgd-ce", "pgd-margin")]
    expected = {
        "single step": wrong["adaptive/fgsm/0.1"].mean() - wrong["adaptive/pgd-ce/0.1"].mean(),
        "more steps": wrong["adaptive/pgd-ce-few/0.1"].mean() - wrong["adaptive/pgd-ce/0.1"].mean(),
        "larger radius": max(chain[0] - chain[1], chain[1] - chain[2]),
        "unbounded": 100 - np.max(either, axis=0).mean(),
        "black box": rise(("square", "random")),
        "losses": max((wrong[f"adaptive/pgd-margin/{r}"] - wrong[f"adaptive/pgd-ce/{r}"]).mean() for r in radii),
        "gradients": 100 * (arrays["gradients/largest"] < 1e-20).mean(),
        "transfer": rise(("transfer",)),
        "randomness": 0.0,
    }
    checks = {check["name"]: check for check in summary["audit"]["checks"]}
    assert {name: check["measured"] for name, check in checks.items()} == pytest.approx(expected)
    broken = [name for name, check in checks.items() if check["measured"] > check["allowed"]]
    assert [name for name, check in checks.items() if check["passed"] is False] == broken
    assert summary["audit"]["masked"] == bool(broken)
    assert ("GRADIENT MASKING" in summary["audit"]["verdict"]) == bool(broken)


# Summaries of outcomes made by hand.


def test_the_worst_of_classes_and_of_numbers():
    target = np.array([0, 1, 2])
    parts = [
        {"target": target, "predicted": np.array([0, 0, 2]), "nll": np.array([0.1, 5.0, 0.2]), "more": np.zeros(3)},
        {"target": target, "predicted": np.array([1, 1, 2]), "nll": np.array([3.0, 0.3, 0.4])},
    ]
    worst = worst_outcome(parts, "classification")
    assert {key: values.tolist() for key, values in worst.items()} == {
        "target": [0, 1, 2],
        "predicted": [1, 0, 2],
        "nll": [3.0, 5.0, 0.2],
    }
    target = np.array([[1.0, 1.0], [0.0, 0.0]])
    parts = [
        {"target": target, "output": np.array([[1.0, 3.0], [0.0, 0.1]]), "std": np.array([[0.1, 0.2], [0.3, 0.4]])},
        {"target": target, "output": np.array([[2.0, 0.5], [-9.0, 0]]), "std": np.array([[0.5, 0.6], [0.7, 0.8]])},
    ]
    worst = worst_outcome(parts, "regression")
    assert worst["output"].tolist() == [[1.0, 3.0], [-9.0, 0.0]]
    assert worst["std"].tolist() == [[0.1, 0.2], [0.7, 0.8]]


def summarize(outcomes, **options):
    settings = {"planned": outcomes.names(), "task": "regression", "budgets": ["0.1"], "main": "0.1"} | options
    settings["interval"] = metric_interval
    return summarize_evaluation(outcomes, **settings)


def test_a_regression_with_std_is_widened_by_the_validation(tmp_path):
    outcomes = Outcomes(tmp_path / "outcomes.npz", {})
    outcomes.set_examples(torch.tensor([0.0, 0.0, 0.0, 0.0]), list("abcd"))
    clean = {"output": np.array([[0.5], [3.0], [-5.0], [20.0]]), "std": np.ones((4, 1))}
    outcomes.add("clean", {"seed": 0}, clean, 0.0)
    assert "coverage_95_widened" not in summarize(outcomes)["clean"]
    outcomes.add("validation", {}, {"extra_variance": np.array(8.0)}, 0.0)
    outcomes.add("noise/blur/1/0", {"corruption": "blur", "level": 1.0, "draw": 0}, clean, 0.0)
    summary = summarize(outcomes)
    for row in (summary["clean"], summary["noise"][0]):
        assert (row["mae"], row["coverage_95"], row["coverage_95_widened"]) == (28.5 / 4, 25.0, 75.0)  # ±1.96, ±5.88
        assert (row["coverage_50"], row["coverage_50_widened"]) == (25.0, 25.0)  # ±0.67, ±2.02
        expected = np.mean([0.5 * math.log(2 * math.pi * 9) + e**2 / 18 for e in (0.5, 3, 5, 20)])
        assert row["nll_widened"] == pytest.approx(expected)
    assert (summary["attacks"], summary["worst_case"]) == ([], [])
    assert "audit" not in summary


def test_a_std_of_0_is_no_number_in_a_record(tmp_path):
    outcomes = Outcomes(tmp_path / "outcomes.npz", {})
    outcomes.set_examples(torch.tensor([0.0, 1.0]), ["a", "b"])
    outcomes.add("clean", {}, {"output": np.array([[0.5], [1.0]]), "std": np.zeros((2, 1))}, 0.0)
    clean = summarize(outcomes)["clean"]
    assert clean["nll"] is None
    assert (clean["coverage_95"], clean["zero_std"]) == (50.0, 100.0)
    json.dumps(clean, allow_nan=False)


def test_several_targets_per_example(tmp_path):
    outcomes = Outcomes(tmp_path / "outcomes.npz", {})
    outcomes.set_examples(torch.tensor([[0.0, 1.0], [2.0, 3.0]]), ["a", "b"])
    outcomes.add("clean", {}, {"output": np.array([[1.0, 1.0], [2.0, 0.0]])}, 0.0)
    settings = {"epsilon": 0.1, "eot": 1, "after": []}
    for attack, output in (("fgsm", [[3.0, 1.0], [2.0, 0.0]]), ("bim", [[0.0, 2.0], [2.0, 9.0]])):
        outcomes.add(f"paper/{attack}/0.1", settings, {"output": np.array(output)}, 0.0)
    summary = summarize(outcomes)
    assert summary["clean"]["mae"] == 1.0
    assert summary["worst_case"][0]["paper"]["mae"] == pytest.approx((1.5 + 3.0) / 2)
    assert [row["mae"] for row in summary["attacks"]] == pytest.approx([1.5, 1.75])


# A network of one's own, without the laboratory.


def test_inputs_in_another_unit_are_attacked_alike():
    """Radii are shares of the range: pixels from 0 to 255 meet the same attacks as pixels from 0 to 1."""
    net, examples = build_net("tensor"), draw_examples()
    settings = Settings("paper", budgets=("16/255",), noise=("blur",))
    unit = evaluate(Target(net), *examples[:2], settings)
    wide = Target(net, bounds=(0, 255), prepare=lambda pixels: pixels / 255)
    pixels = evaluate(wide, 255 * examples.x, examples.y, settings)
    assert unit.parts == pixels.parts
    for part in unit.parts:
        same = unit.outcomes[part]["predicted"] == pixels.outcomes[part]["predicted"]
        assert same.mean() >= 7 / 8  # a sign of a gradient near 0 may be another
    assert pixels.outcomes.settings("paper/bim/16/255")["epsilon"] == pytest.approx(16 / 255)


def test_the_audit_of_any_network_in_a_few_lines():
    examples = draw_examples()
    settings = Settings("adaptive", budgets=("8/255", 0.1), noise=("all",), steps=2, queries=5, repeats=1)
    report = evaluate(Target(build_net("tensor")), *examples[:2], settings, twin=Target(build_net("dropout")))
    summary = report.summary()
    assert {row["budget"] for row in summary["worst_case"]} == {"8/255", "0.1"}
    assert "low" not in summary["clean"]
    assert summary["audit"] == report.audit().as_record()
    lines = str(report).splitlines()
    assert lines[0] == "accuracy in %, 8 examples"
    assert lines[-1] == report.audit().verdict
    assert sum("noise gaussian" in line for line in lines) == len(CORRUPTIONS["gaussian"].levels)
    assert evaluate(Target(build_net("tensor")), *examples[:2], Settings("paper", noise=())).audit() is None


def test_an_attack_of_one_s_own_joins_the_ensemble(monkeypatch):
    from tensor_dropout.robustness.attacks import ATTACKS, AttackEntry, ensemble, register_attack

    calls = []

    def nudge(epsilon, *, loss, seed):
        def attack(target, x, y):
            calls.append((epsilon, loss, seed))
            return target.clip(x + epsilon)

        return attack

    monkeypatch.setattr("tensor_dropout.robustness.attacks.ATTACKS", dict(ATTACKS))
    register_attack(AttackEntry("nudge", nudge, "black box", ("margin",), ("classification",)))
    with pytest.raises(TensorDropoutError, match="the name 'nudge' is taken"):
        register_attack(AttackEntry("nudge", nudge, "gradient"))
    assert ensemble("classification", "0.1")[-1] == "adaptive/nudge/0.1"
    assert "adaptive/nudge/0.1" not in ensemble("regression", "0.1")
    target, x = Target(build_net("tensor")), draw_examples().x
    y = target.predict(x).output.argmax(1)
    report = evaluate(target, x, y, Settings("adaptive", ("1e-6",), noise=(), steps=1, queries=1, seed=3))
    assert calls == [(1e-6, "margin", 3)]
    assert "nudge" in [row["attack"] for row in report.summary()["attacks"]]
