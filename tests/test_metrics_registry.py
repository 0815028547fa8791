"""The list of metrics: what its entries promise, and that kept records have the numbers it computes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.metrics import outcome_arrays, registry
from tensor_dropout.metrics.outcome_arrays import describe_classes
from tensor_dropout.metrics.registry import (
    METRICS,
    Metric,
    find_main,
    find_metric,
    list_metrics,
    main_metric,
    summarize,
)
from tensor_dropout_lab.training.evaluation import Outcome, summarize_outputs

TASKS = ("classification", "regression")


def draw_outcomes(task, noise):
    """A good and a worse outcome of one task: the second has ``noise`` on its answers."""
    random = np.random.default_rng(0)
    if task == "regression":
        y, spread = random.standard_normal((400, 2)), random.uniform(0.1, 0.2, (400, 2))
        return [
            {"target": y, "output": y + width * random.standard_normal((400, 2)), "std": spread * (1 + 4 * width)}
            for width in (0.1, noise)
        ]
    y = random.integers(0, 8, 400)
    logits = [6 * np.eye(8)[y] + width * random.standard_normal((400, 8)) for width in (0.5, 5 * noise)]
    return [describe_classes(torch.tensor(each).log_softmax(1).numpy(), y) for each in logits]


def test_names_are_unique_within_a_task():
    keys = [(metric.task, metric.name) for metric in METRICS]
    assert len(keys) == len(set(keys))
    assert [main_metric(task).name for task in TASKS] == ["accuracy", "mae"]


@pytest.mark.parametrize("task", TASKS)
def test_which_way_is_better(task):
    good, bad = (summarize(outcome) for outcome in draw_outcomes(task, noise=1.0))
    for metric in list_metrics(task):
        if metric.name == "zero_std":  # both have none
            continue
        if metric.better == "higher":
            assert good[metric.name] > bad[metric.name], metric.name
        elif metric.better == "lower":
            assert good[metric.name] < bad[metric.name], metric.name


@pytest.mark.parametrize("task", TASKS)
def test_a_metric_alone_is_the_one_among_all(task):
    outcome = draw_outcomes(task, noise=0.5)[1]
    together = summarize(outcome)
    assert list(together) == [metric.name for metric in list_metrics(task)]
    for metric in list_metrics(task):
        arrays = ("target", "predicted" if task == "classification" else "output", *metric.needs)
        alone = summarize({name: outcome[name] for name in arrays}, [metric.name])
        assert alone == {metric.name: together[metric.name]}


def test_the_task_is_told_by_the_main_metric():
    assert find_main({"nll": 1.0, "accuracy": 3.0}).task == "classification"
    assert find_main({"nll": 1.0, "mae": 3.0}).task == "regression"
    for numbers in ({"nll": 1.0}, {"mae": 1.0, "accuracy": 2.0}):
        with pytest.raises(TensorDropoutError, match="accuracy or mae, one of them; these have"):
            find_main(numbers)
    with pytest.raises(TensorDropoutError, match="no metric 'acc'; known are accuracy, top5"):
        find_metric("acc")


def test_outcome_of_classes_against_torch():
    logits = torch.randn(300, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.arange(300) % 20
    found = describe_classes(logits.log_softmax(1).numpy(), y.numpy())
    probs = logits.softmax(1)
    hit = torch.nn.functional.one_hot(y, 20)
    expected = {
        "predicted": probs.argmax(1),
        "confidence": probs.amax(1),
        "rest": 1 - probs.amax(1),
        "entropy": torch.special.entr(probs).sum(1),
        "nll": torch.nn.functional.cross_entropy(logits, y, reduction="none"),
        "brier": (probs - hit).square().sum(1),
        "top5": (logits.topk(5).indices == y[:, None]).any(1),
    }
    for name, values in expected.items():
        torch.testing.assert_close(torch.tensor(found[name]), values, msg=name)


def test_many_examples_are_described_in_blocks(monkeypatch):
    log_probs = torch.randn(23, 7).log_softmax(1).double().numpy()
    y = np.arange(23) % 7
    whole = describe_classes(log_probs, y)
    monkeypatch.setattr(outcome_arrays, "_BLOCK", 30)  # four rows
    blocks = describe_classes(log_probs, y)
    assert blocks.keys() == whole.keys()
    assert all(np.array_equal(blocks[name], whole[name]) for name in whole)


def test_equal_probabilities_are_no_top_five_hit_for_the_last_classes():
    found = describe_classes(np.full((10, 10), -math.log(10)), np.arange(10))
    assert found["top5"].tolist() == [True] * 5 + [False] * 5
    assert not found["predicted"].any()


def test_the_rest_of_a_sure_answer_is_not_rounded_away():
    found = describe_classes(np.array([[-1e-30, -40.0]]), np.array([0]))
    assert found["confidence"] == 1
    assert found["rest"] == pytest.approx(math.exp(-40))


def test_examples_of_unknown_classes_have_no_likelihood():
    found = describe_classes(np.log([[0.9, 0.1], [0.4, 0.6]]), np.array([0, -1]))
    assert found.keys() == {"target", "predicted", "confidence", "rest", "entropy"}


def test_a_new_entry_is_in_every_summary(monkeypatch):
    """One entry, and training, evaluation and the record of each of several targets have the number."""
    largest = Metric(
        "largest",
        "regression",
        "largest error",
        "largest absolute error",
        "lower",
        lambda arrays: float(np.abs(arrays["output"] - arrays["target"]).max()),
        unit="target",
    )
    monkeypatch.setattr(registry, "METRICS", (*METRICS, largest))
    y = torch.tensor([[0.0, 0.0], [1.0, 5.0]])
    found = summarize_outputs(Outcome(y + torch.tensor([[0.5, 0.0], [0.0, -3.0]]), y), "regression", ("age", "volume"))
    assert found["largest"] == 3
    assert {name: numbers["largest"] for name, numbers in found["targets"].items()} == {"age": 0.5, "volume": 3}
    assert find_metric("largest").head("years") == "largest error, years"
