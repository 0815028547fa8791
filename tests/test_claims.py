"""The verdicts that the report opens with: they follow from records by a rule, and change when the records do."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tensor_dropout_lab.evaluation.intervals import difference_interval
from tensor_dropout_lab.experiments.recipes import list_experiments
from tensor_dropout_lab.record_store import RecordStore
from tensor_dropout_lab.report import claims
from tensor_dropout_lab.report.claims import judge_claims
from tensor_dropout_lab.report.drawings import draw_claim
from tensor_dropout_lab.report.model import Claim, Measure

RESULTS = Path(__file__).parents[1] / "results"


def judge(measures, **settings):
    return Claim("", "", "", "", [Measure("", *numbers) for numbers in measures], **settings).verdict


@pytest.mark.parametrize(
    ("measures", "settings", "verdict"),
    [
        ([(1, 0.5, 2), (3, 1, 4)], {}, "holds"),
        ([(1, 0.5, 2), (-3, -4, 1)], {}, "holds in part"),
        ([(1, 0.5, 2), (-3, -4, -1)], {}, "mixed"),
        ([(1, -0.5, 2), (0, -1, 1)], {}, "not shown"),
        ([(1, -0.5, 2), (-3, -4, -1)], {}, "does not hold"),
        ([(1, 0.0, 2)], {}, "not shown"),  # an end on the line excludes nothing
        ([(0.5, 0.5, 0.5)], {"reference": 1.0, "side": "below"}, "holds"),
        ([(25, 25, 25)], {"reference": 1.0, "side": "below"}, "does not hold"),
        ([(0.1, -1, 1)], {"reference": 2.0, "side": "within"}, "holds"),
        ([(0.1, -1, 3)], {"reference": 2.0, "side": "within"}, "not shown"),  # too noisy to be the same
        ([(4, 3, 5)], {"reference": 2.0, "side": "within"}, "does not hold"),
        ([(math.nan, math.nan, math.nan)], {"reference": 2.0, "side": "within"}, "not shown"),
        ([], {}, "not run"),
    ],
)
def test_a_verdict_follows_from_where_the_intervals_lie(measures, settings, verdict):
    assert judge(measures, **settings) == verdict


def test_without_records_nothing_is_judged(tmp_path):
    for base in (None, tmp_path):
        judged = judge_claims(base)
        assert len(judged) > 10
        assert {claim.verdict for claim in judged} == {"not run"}


def test_every_claim_points_to_an_experiment_and_says_its_unit():
    for claim in judge_claims(RESULTS):
        assert claim.section in list_experiments()
        assert claim.statement
        assert claim.place
        assert claim.unit


def test_a_measure_is_the_difference_of_the_records_and_has_the_papers_beside_it():
    store = RecordStore(RESULTS)
    scores = {
        head: [store.run("cifar100", f"{head}-seed{seed}").read("result.json")["test"]["accuracy"] for seed in range(3)]
        for head in ("fc", "rtrl-cp")
    }
    [claim] = [claim for claim in judge_claims(RESULTS) if "classifies CIFAR-100" in claim.statement]
    measure = claim.measures[1]
    assert measure.value == pytest.approx(sum(scores["rtrl-cp"]) / 3 - sum(scores["fc"]) / 3)
    assert (measure.low, measure.high) == pytest.approx(difference_interval(scores["rtrl-cp"], scores["fc"]))
    assert measure.printed == pytest.approx(76.19 - 75.88)


@pytest.mark.parametrize(("shift", "verdict"), [(5.0, "holds"), (-5.0, "does not hold")])
def test_other_records_give_another_verdict(shift, verdict, monkeypatch):
    accuracies = claims._accuracies

    def shifted(runs):
        return [score + shift * runs.recipe.name.startswith("rtrl") for score in accuracies(runs)]

    monkeypatch.setattr(claims, "_accuracies", shifted)
    [claim] = [claim for claim in judge_claims(RESULTS) if "classifies CIFAR-100" in claim.statement]
    assert claim.verdict == verdict


def test_the_picture_has_a_line_for_each_measure(tmp_path):
    claim = Claim("", "", "", "points", [Measure("Tucker", -0.5, -1, 0), Measure("CP", 0.5, 0.1, 1, 0.3)])
    figure = draw_claim(claim, tmp_path / "claim")
    assert ElementTree.parse(figure.svg).getroot().tag.endswith("svg")
    assert figure.alt == "Tucker: −0.50 [−1.00, +0.00]; CP: +0.50 [+0.10, +1.00] (paper +0.30)"
    assert "Hollow: the paper's" in figure.caption
