"""Finding the head: what is seen while a network runs, which layer is the head, and how to choose another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensor_dropout as td
from surgery_models import (
    BY_NAME,
    IMAGE,
    Backbone,
    Mobile,
    Residual,
    Snapshot,
    SqueezeDense,
    SqueezePointwise,
    Vgg,
    every_case,
    make,
    make_batch,
    plain,
    refused,
    relative_change,
)
from tensor_dropout.surgery.find_head import (
    at_rest,
    choose_heads,
    describe_module,
    is_linear_like,
    is_pointwise,
    run,
    trace,
)


def image(batch=3):
    return torch.randn(batch, *IMAGE, generator=torch.Generator().manual_seed(1))


@every_case
def test_the_head_is_found_and_the_model_is_left_alone(case):
    model, x = make(case), make_batch(case)
    before, y = Snapshot(model), model(x)
    traced = trace(model, x)
    before.check()
    (found,) = choose_heads(traced)
    assert found.name == case.head
    assert found.module is model.get_submodule(case.head)
    assert found.calls == 1
    assert torch.equal(traced.output[0], y)
    if case.note != "does not compute the same with its pooling widened":  # that is seen later, by trying
        assert (found.kind, found.features) == (case.kind, case.features)


def test_every_linear_layer_is_seen_with_what_feeds_it():
    traced = trace(Mobile(SqueezeDense).eval(), image())
    seen = {each.name: (each.kind, each.features) for each in traced.seen}
    assert seen["features.3.fc.0"] == ("pool", (8, 4, 4))
    assert seen["features.3.fc.2"] == ("features", (4,))
    assert seen["classifier.1"] == ("pool", (6, 4, 4))
    assert set(seen) == {f"features.{k}.fc.{n}" for k in (3, 5) for n in (0, 2)} | {"features.4", "classifier.1"}


def test_calls_are_counted():
    layer = nn.Linear(4, 4)
    traced = trace(nn.Sequential(layer, nn.ReLU(), layer, layer), torch.randn(2, 4))
    assert [each.calls for each in traced.seen] == [3]


@pytest.mark.parametrize("gate", [SqueezePointwise, SqueezeDense])
def test_gates_are_no_heads(gate):
    (found,) = choose_heads(trace(Mobile(gate).eval(), image()))
    assert found.name == "classifier.1"


def test_a_gate_right_before_the_pooling_is_no_head():
    model = Backbone(
        lambda m, x: m.fc(m.pool(m.gate(x)).flatten(1)),
        gate=SqueezeDense(6),
        pool=nn.AdaptiveAvgPool2d(1),
        fc=nn.Linear(6, 5),
    )
    assert [each.name for each in choose_heads(trace(model, image()))] == ["fc"]


def test_a_container_whose_name_ends_in_linear_is_no_layer():
    class NormLinear(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 5)

        def forward(self, x):
            return self.linear(self.norm(x))

    model = Backbone(lambda m, x: m.fc(m.pool(x).flatten(1)), pool=nn.AdaptiveAvgPool2d(1), fc=NormLinear()).eval()
    assert [each.name for each in choose_heads(trace(model, image()))] == ["fc.linear"]
    before = model(image())
    td.tensorize_(model, image())
    assert relative_change(model(image()), before) < 1e-4


def test_an_auxiliary_head_makes_it_ambiguous():
    class Auxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 3)
            self.pool, self.other_pool = nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d(1)
            self.aux, self.fc = nn.Linear(4, 5), nn.Linear(6, 5)

        def forward(self, x):
            x = self.first(x)
            aux = self.aux(self.other_pool(x).flatten(1))
            return self.fc(self.pool(self.second(x)).flatten(1)), aux

    model = Auxiliary().eval()
    with refused(r"2 heads: 'aux' \(Linear\(4 -> 5\), fed by an averaged map 4×6×6\); 'fc'", model):
        td.tensorize_(model, image())
    assert [each.name for each in td.tensorize_(model, image(), heads=["fc", "aux"]).replacements] == ["fc", "aux"]


def test_the_last_of_a_chain_on_features_is_the_head():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    assert [each.name for each in choose_heads(trace(model, torch.randn(2, 6)))] == ["4"]


def test_image_and_other_features_meet_in_the_head():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.pool = nn.Conv2d(3, 6, 3), nn.AdaptiveAvgPool2d(1)
            self.table, self.fc = nn.Linear(4, 3), nn.Linear(9, 5)

        def forward(self, pixels, table):
            return self.fc(torch.cat([self.pool(self.body(pixels)).flatten(1), F.relu(self.table(table))], 1))

    model = Both().eval()
    x = (image(), torch.randn(3, 4))
    before = model(*x)
    report = td.tensorize_(model, x)
    assert (report.replacements[0].name, report.replacements[0].input_shape) == ("fc", (9,))
    assert relative_change(model(*x), before) < 1e-4


# Choosing another layer.


def test_heads_names_another_layer():
    model = Vgg().eval()
    x = torch.randn(2, 3, 12, 8)
    before = model(x)
    report = td.tensorize_(model, x, heads="classifier.3")
    assert [(each.name, each.kind) for each in report.replacements] == [("classifier.3", "features")]
    assert isinstance(model.classifier[0], nn.Linear)
    assert relative_change(model(x), before) < 1e-4


def test_heads_in_the_order_of_the_names():
    model = Vgg().eval()
    report = td.tensorize_(model, torch.randn(2, 3, 12, 8), heads=["classifier.3", "classifier.0", "classifier.3"])
    assert [each.name for each in report.replacements] == ["classifier.3", "classifier.0"]
    assert report.parameters_after == sum(p.numel() for p in model.parameters())


def test_a_second_name_of_the_head():
    model = Residual().eval()
    model.alias = model.fc
    report = td.tensorize_(model, image(), heads="alias")
    assert report.replacements[0].name == "alias"
    assert model.alias is model.fc


def test_the_filter_gets_module_and_name_and_replaces_all_that_it_accepts():
    model = Mobile(SqueezeDense).eval()
    asked = []

    def accept(module, name):
        asked.append((name, module))
        return isinstance(module, nn.Linear) and module.out_features > 4

    before = model(image())
    report = td.tensorize_(model, image(), filter_fn=accept)
    assert [each.name for each in report.replacements] == ["features.3.fc.2", "features.5.fc.2", "classifier.1"]
    assert {name for name, _ in asked} >= {"classifier.1", "features.3.fc.0"}
    assert relative_change(model(image()), before) < 1e-4


def test_a_gate_can_be_converted_by_name():
    model = Mobile().eval()
    before = model(image())
    report = td.tensorize_(model, image(), heads="features.3.fc1")
    assert report.replacements[0].kind == "pool"
    assert relative_change(model(image()), before) < 1e-4


# Parts.


def test_describe():
    assert describe_module(nn.Linear(512, 10)) == "Linear(512 -> 10)"
    assert describe_module(nn.Conv3d(4, 2, 1)) == "Conv3d(4 -> 2)"


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Conv2d(4, 2, 1), True),
        (nn.Conv1d(4, 2, 1, padding="same"), True),
        (nn.Conv3d(4, 2, (1, 1, 1)), True),
        (nn.Conv2d(4, 2, 3), False),
        (nn.Conv2d(4, 2, (1, 3)), False),
        (nn.Conv2d(4, 2, 1, groups=2), False),
        (nn.Conv2d(4, 2, 1, padding=1), False),
        (nn.ConvTranspose2d(4, 2, 1), False),
        (nn.Linear(4, 2), False),
    ],
    ids=str,
)
def test_pointwise_convolutions(layer, expected):
    assert is_pointwise(layer) == expected
    assert is_linear_like(layer) == (expected or isinstance(layer, nn.Linear))


@pytest.mark.parametrize(
    "example", [lambda: image(), lambda: (image(),), lambda: {"input": image()}], ids=["tensor", "tuple", "dict"]
)
def test_run_takes_all_three_kinds_of_example(example):
    model = plain().eval()
    (y,) = run(model, example())
    assert torch.equal(y, model(image()))


def test_run_passes_on_the_words_of_the_model():
    def fail(model, x):
        raise OSError("the disk is on fire\nand more")

    with pytest.raises(td.TensorDropoutError, match=r"Backbone does not run.*OSError: the disk is on fire;") as caught:
        run(Backbone(fail), image())
    assert isinstance(caught.value.__cause__, OSError)


def test_at_rest_puts_modes_statistics_and_random_state_back_also_after_a_failure():
    model = Residual().train()
    model.block.eval()
    before = Snapshot(model)

    def fail():
        with at_rest(model, []):
            assert not any(module.training for module in model.modules())
            model.stem[1].train()
            model(torch.rand_like(image()))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    before.check()


@pytest.mark.parametrize("failing", [False, True])
def test_no_hook_is_left_behind(failing):
    def end(model, x):
        if failing:
            raise RuntimeError("no")
        return model.fc(model.pool(x).flatten(1))

    model = Backbone(end, pool=nn.AdaptiveAvgPool2d(1), fc=nn.Linear(6, 5)).eval()
    before = Snapshot(model)
    if failing:
        with pytest.raises(td.TensorDropoutError):
            trace(model, image())
    else:
        trace(model, image())
    before.check()


def test_the_users_hooks_run_while_tracing_and_see_what_they_see():
    model = plain().eval()
    shapes = []
    model[2].register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    trace(model, image())
    assert shapes == [(3, 8, 1, 1)]


def test_batches_of_one():
    case = BY_NAME["resnet-2d"]
    (found,) = choose_heads(trace(make(case), make_batch(case, batch=1)))
    assert (found.kind, found.features) == (case.kind, case.features)
