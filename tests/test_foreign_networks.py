"""Networks of torchvision, timm, MONAI and the user under our heads: trained, saved, loaded, attacked, converted.

The cases of torchvision and timm run wherever those packages import; the others need MONAI.
"""

from __future__ import annotations

import copy
import importlib
import json
import subprocess
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing import assert_close
from typer.testing import CliRunner

import tensor_dropout as td
from tensor_dropout.network_builders import build_network
from tensor_dropout_lab import cli
from tensor_dropout_lab.data import load_data
from tensor_dropout_lab.explanation import explain
from tensor_dropout_lab.nets import HEADS, build_net, build_plain, families, load_backbone, register_family, rescale_
from tensor_dropout_lab.nets.families import describe_families, find_family
from tensor_dropout_lab.training.config import resolve_config
from training_runs import assert_equal_runs, configure, make_trainer, run

pytest.importorskip("monai", reason="needs MONAI")

DENSE = {"init_features": 16, "growth_rate": 8, "block_config": [2]}  # features (32, 2, 2) of digits
MONAI = {
    "DenseNet-2d": ("monai:DenseNet", (1, 8, 8), DENSE, (32, 2, 2), "class_layers.out"),
    "DenseNet-3d": (
        "monai:DenseNet",
        (1, 16, 16, 16),
        {**DENSE, "block_config": [2, 2]},
        (32, 2, 2, 2),
        "class_layers.out",
    ),
    "resnet10": ("monai:resnet10", (1, 32, 32, 32), {"widen_factor": 0.125}, (64, 2, 2, 2), "fc"),
    "EfficientNetBN": ("monai:EfficientNetBN", (3, 64, 64), {"model_name": "efficientnet-b0"}, (1280, 2, 2), "_fc"),
    "SEResNet50": ("monai:SEResNet50", (1, 64, 64), {"inplanes": 16}, (2048, 2, 2), "last_linear"),
}
OTHERS = {
    "torchvision": ("resnet18", "densenet121", "mobilenet_v2", "shufflenet_v2_x0_5", "vgg11", "efficientnet_b0",
                    "convnext_tiny", "swin_t", "squeezenet1_0", "mnasnet0_5", "regnet_y_400mf", "googlenet"),
    "timm": ("resnet18", "convnext_atto", "mobilenetv3_small_050", "efficientnet_b0", "densenet121",
             "swin_tiny_patch4_window7_224", "regnety_002", "edgenext_xx_small"),
}  # fmt: skip
OPTIONS = {
    "swin_tiny_patch4_window7_224": {"img_size": 64, "window_size": 2},
    "googlenet": {"aux_logits": False, "init_weights": False},
}
every_monai = pytest.mark.parametrize("case", MONAI)
DIGITS = {"net__name": "monai:DenseNet", "net__options": DENSE}


def build(case, head="rtrl-cp", outputs=3, **settings):
    name, shape, options, *_ = MONAI[case]
    return build_net(name, outputs=outputs, input_shape=shape, head=head, options=options, **settings)


def make_batch(net, size=2):
    return torch.randn(size, *net.input_shape, generator=torch.Generator().manual_seed(1))


def check_life(net, tmp_path):
    """One step of training, saving and loading without a model, exact conversion there and back, explanation."""
    x = make_batch(net)
    optimizer = torch.optim.SGD(td.param_groups(net, lr=1e-3, weight_decay=0.0), momentum=0.9)
    net.train()(x).square().mean().backward()
    idle = [name for name, parameter in net.named_parameters() if parameter.requires_grad and parameter.grad is None]
    assert idle == []
    optimizer.step()
    net.eval()
    expected = net(x)
    path = tmp_path / "net.safetensors"
    td.save(net, path)
    again = td.load(path).eval()
    assert torch.equal(again(x), expected)
    assert again.settings == net.settings
    found = explain(net, x)
    assert found.contributions.shape == (2, *net.feature_shape[1:], expected.shape[1])
    return x, expected, again


@every_monai
def test_head_sits_on_the_last_feature_map(case):
    _, shape, _, features, published = MONAI[case]
    net = build(case)
    assert (net.feature_shape, net.input_shape) == (features, shape)
    assert net.backbone.left_out == (published,)
    assert tuple(net.forward_features(make_batch(net)).shape[1:]) == features
    assert net.head.input_shape == features
    assert not [name for name in net.state_dict() if f"network.{published}." in name]


@every_monai
def test_our_fc_with_the_published_weights_is_the_published_network(case):
    name, shape, options, _, published = MONAI[case]
    torch.manual_seed(2)
    plain = build_plain(name, outputs=3, input_shape=shape, options=options).eval()
    net = build(case, "fc").eval()
    load_backbone(net, plain.state_dict())
    net.head.load_state_dict(plain.get_submodule(published).state_dict())
    x = make_batch(net)
    assert_close(net(x), plain(x), rtol=1e-4, atol=1e-5)


@every_monai
def test_life_of_a_network(case, tmp_path):
    net = build(case)
    x, expected, again = check_life(net, tmp_path)
    td.merge_(again)
    assert_close(again(x), expected, rtol=1e-3, atol=1e-4)
    rescale_(net, torch.tensor([2.0, 3.0, 4.0]), torch.tensor([1.0, 0.0, -1.0]))
    assert_close(
        net(x), expected * torch.tensor([2.0, 3.0, 4.0]) + torch.tensor([1.0, 0.0, -1.0]), rtol=1e-4, atol=1e-4
    )


def test_a_linear_head_converts_saves_and_merges_back(tmp_path):
    net = build("DenseNet-2d", "fc").eval()
    x = make_batch(net)
    before = net(x)
    report = td.tensorize_(net, x, dropout=0.8)
    assert (report.replacements[0].name, report.replacements[0].input_shape) == ("fc", (32, 2, 2))
    td.save(net, tmp_path / "net.safetensors")
    loaded = td.load(tmp_path / "net.safetensors").eval()
    assert_close(loaded(x), before, rtol=1e-4, atol=1e-5)
    td.merge_(loaded)
    assert_close(loaded(x), before, rtol=1e-4, atol=1e-5)


def test_a_file_loads_where_nothing_else_was_imported(tmp_path):
    net = build("DenseNet-2d").eval()
    td.save(net, tmp_path / "net.safetensors")
    save_file({"x": make_batch(net), "y": net(make_batch(net))}, tmp_path / "xy.safetensors")
    code = (
        "import sys, torch, tensor_dropout as td; from safetensors.torch import load_file\n"
        f"xy = load_file({str(tmp_path / 'xy.safetensors')!r})\n"
        "assert 'monai' not in sys.modules\n"
        f"net = td.load({str(tmp_path / 'net.safetensors')!r}).eval()\n"
        "torch.testing.assert_close(net(xy['x']), xy['y'])\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("head", HEADS)
def test_every_head_fits(head):
    net = build("DenseNet-2d", head)
    net(make_batch(net)).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in net.parameters())


def test_a_whole_network_compiles_to_one_graph_in_channels_last():
    torch._dynamo.reset()
    net = build("DenseNet-2d", "rtrl-tucker").eval()
    x = make_batch(net)
    compiled = torch.compile(
        copy.deepcopy(net).to(memory_format=torch.channels_last), backend="aot_eager", fullgraph=True
    )
    assert_close(compiled(x.to(memory_format=torch.channels_last)), net(x), rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


def test_exports(tmp_path):
    net = build("DenseNet-2d").eval()
    td.save(net, tmp_path / "net.safetensors")
    invoke("export", tmp_path / "net.safetensors", "--to", "pt2", "-o", tmp_path / "net.pt2")
    exported = torch.export.load(tmp_path / "net.pt2").module()
    x = make_batch(net, 5)
    assert_close(exported(x), net(x), rtol=1e-4, atol=1e-5)


# The trainer.


def test_a_run_is_resumed_bit_for_bit(tmp_path):
    run(tmp_path / "whole", **DIGITS, run__epochs=2)
    data = load_data("digits")
    trainer = make_trainer(tmp_path / "cut", data, **DIGITS, run__epochs=2)
    trainer.folder.open(configure(**DIGITS, run__epochs=2), data, {})
    trainer.run_epoch(0, 0, type("Never", (), {"asked": False})())
    trainer.finish_epoch(0)
    trainer.save()
    run(tmp_path / "cut", **DIGITS, run__epochs=2)
    assert_equal_runs(tmp_path / "cut", tmp_path / "whole")


def test_a_network_of_volumes_answers_in_years_with_its_exact_spread(tmp_path):
    options = {"n": 40, "size": [16, 16, 16]}
    settings = {"data__name": "phantom", "data__options": options, "run__batch": 8, "run__epochs": 2}
    result = run(tmp_path, **settings, net__name="monai:DenseNet", net__options={**DENSE, "block_config": [2, 2]})
    network, data = td.load(tmp_path / "model.safetensors").eval(), load_data("phantom", n=40, size=(16, 16, 16))
    assert network.feature_shape == (32, 2, 2, 2)
    prediction = td.predict(network, data.prepare(data.test.inputs), mode="exact", task="regression")
    error = (prediction.mean.flatten() - data.test.targets.flatten()).abs().mean()
    assert error.item() == pytest.approx(result["test"]["mae"], rel=1e-3)
    assert abs(float(prediction.mean.mean()) - float(data.train.targets.mean())) < 15
    assert (prediction.std > 0).all()


def invoke(*words, code=0):
    result = CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, [str(word) for word in words])
    assert result.exit_code == code, f"{result.output} {result.exception!r}"
    return result.output


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of a MONAI network on digits, made by the command."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    options = [f"--set=net.options.{key}={value}" for key, value in DENSE.items()]
    threads = ["--set", "run.threads=1", "--set", "run.workers=0"]
    invoke("train", "--data", "digits", "--net", "monai:DenseNet", *options, "--epochs", 12, *threads, "--out", folder)
    return folder


def test_the_command_trains_and_records_it(trained):
    record, result = (json.loads((trained / name).read_text()) for name in ("run.json", "result.json"))
    assert record["settings"]["net.name"] == "monai:DenseNet"
    assert record["settings"]["net.options.block_config"] == [2]
    assert record["head"]["rank"] == 16
    assert result["head_parameters"] == 16 * (32 + 2 + 2 + 10) + 10
    assert result["test"]["accuracy"] > 50
    assert resolve_config(trained / "config.toml").net.options == DENSE
    net = td.load(trained / "model.safetensors").eval()
    assert (net.settings["name"], net.settings["outputs"]) == ("monai:DenseNet", 10)


def test_the_command_evaluates_attacks_and_audits_it(trained, tmp_path):
    small = ["--images", "24", "--steps", "3", "--queries", "20", "--twin-epochs", "2", "--repeats", "1"]
    invoke(
        "evaluate", trained, *small, "--epsilon", "0.1", "--head-sizes", "2", "--device", "cpu", "--out", tmp_path / "e"
    )
    summary = json.loads((tmp_path / "e/evaluation.json").read_text())["summary"]
    assert summary["clean"]["accuracy"] > 30
    assert summary["audit"]
    assert {row["kind"] for row in summary["heads"]} == {"rank", "whole"}


def test_the_command_converts_it(tmp_path):
    net = build("DenseNet-2d", "fc", outputs=10).eval()
    td.save(net, tmp_path / "fc.safetensors")
    invoke("convert", tmp_path / "fc.safetensors", "--theta", "0.8", "-o", tmp_path / "td.safetensors")
    x = make_batch(net)
    assert_close(td.load(tmp_path / "td.safetensors").eval()(x), net(x), rtol=1e-4, atol=1e-4)


def test_published_weights_are_converted_with_their_own_head(tmp_path):
    name, shape, options, *_ = MONAI["DenseNet-2d"]
    plain = build_plain(name, outputs=7, input_shape=shape, options=options).eval()
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    words = [
        "--arch",
        name,
        "--input",
        "1,8,8",
        "--model-arguments",
        json.dumps(options),
        "-o",
        tmp_path / "td.safetensors",
    ]
    invoke("convert", tmp_path / "plain.pt", *words)
    x = torch.randn(2, *shape)
    converted = td.load(tmp_path / "td.safetensors").eval()
    assert [type(module).__name__ for module in converted.modules()].count("TuckerRegression") == 1
    assert_close(converted(x), plain(x), rtol=1e-4, atol=1e-4)


def test_training_starts_from_published_weights(tmp_path):
    name, shape, options, _, published = MONAI["DenseNet-2d"]
    plain = build_plain(name, outputs=1000, input_shape=shape, options=options)  # of another number of classes
    save_file(plain.state_dict(), tmp_path / "plain.safetensors")
    data = load_data("digits")
    trainer = make_trainer(tmp_path / "run", data, **DIGITS, net__weights=str(tmp_path / "plain.safetensors"))
    expected = {key: value for key, value in plain.state_dict().items() if published not in key}
    assert expected
    state = trainer.plain.state_dict()
    assert all(torch.equal(state[f"backbone.network.{key}"], value) for key, value in expected.items())
    with pytest.raises(td.TensorDropoutError, match=r"do not fit resnet-mini .* missing: conv1\.weight"):
        make_trainer(tmp_path / "other", data, net__weights=str(tmp_path / "plain.safetensors"))


def test_weights_that_do_not_fit_load_nothing():
    net, other = build("DenseNet-2d"), build("DenseNet-2d")
    state = {
        key.removeprefix("backbone.network."): value for key, value in other.state_dict().items() if "fc" not in key
    }
    before = copy.deepcopy(net.state_dict())
    state["features.conv0.weight"] = torch.zeros(3, 3)
    with pytest.raises(td.TensorDropoutError, match=r"of another shape: features.conv0.weight \(3, 3\) instead of"):
        load_backbone(net, state)
    assert_close(dict(net.state_dict()), dict(before), rtol=0, atol=0)


# Families, and functions of the user.


def small_net(in_channels, num_classes, width=4):
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, num_classes),
    )


class OwnBackbone(nn.Module):
    """One that says its feature shape, so that nothing is searched."""

    def __init__(self, input_shape):
        super().__init__()
        channels, height, width = input_shape
        self.body = nn.Conv2d(channels, 6, 3)
        self.feature_shape = (6, height - 2, width - 2)

    def forward(self, x):
        return self.body(x)


def broken_net():
    raise KeyError("no such layer")


def no_net():
    return 3


def needs_more(in_channels, depth):
    return nn.Linear(in_channels, depth)


HERE = __name__


@pytest.mark.parametrize(("function", "options", "features"), [("small_net", {"width": 5}, 5), ("OwnBackbone", {}, 6)])
def test_a_function_of_ones_own(function, options, features, tmp_path):
    net = build_net(f"{HERE}:{function}", outputs=10, input_shape=(1, 8, 8), head="rtrl-cp", options=options)
    assert net.feature_shape == (features, 6, 6)
    check_life(net, tmp_path)


def test_a_file_does_not_decide_what_code_is_run(tmp_path, monkeypatch):
    net = build_net(f"{HERE}:small_net", outputs=3, input_shape=(1, 8, 8))
    td.save(net, tmp_path / "net.safetensors")
    monkeypatch.setattr(families, "_TRUSTED", set())
    with pytest.raises(td.TensorDropoutError, match=f"a file must not decide what code is run; .* --import {HERE}"):
        td.load(tmp_path / "net.safetensors")
    families.trust(HERE)
    x = make_batch(net)
    assert torch.equal(td.load(tmp_path / "net.safetensors").eval()(x), net.eval()(x))


def test_what_a_user_imports_by_name_is_trusted(tmp_path, monkeypatch):
    (tmp_path / "nets_for_a_run.py").write_text(
        "from torch import nn\n"
        "def build(in_channels, num_classes):\n"
        "    layers = [nn.Conv2d(in_channels, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]\n"
        "    return nn.Sequential(*layers, nn.Linear(6, num_classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(families, "_TRUSTED", set())
    quiet = ["--epochs", 1, "--set", "run.threads=1", "--set", "run.workers=0", "--out", "run"]
    invoke("train", "--data", "digits", "--net", "nets_for_a_run:build", *quiet)
    families._TRUSTED.clear()
    look = ["evaluate", "run", "--protocol", "none", "--images", "8", "--repeats", "1"]
    assert "--import nets_for_a_run" in invoke(*look, code=1)
    invoke("--import", "nets_for_a_run", *look)


def test_a_new_family_is_one_function_and_one_registration(tmp_path):
    def build_mine(name, *, input_shape, outputs, options, trusted):
        return small_net(input_shape[0], outputs, width=int(name))

    register_family("mine", build_mine)
    try:
        net = build_net("mine:7", outputs=3, input_shape=(1, 8, 8), head="trl-tt")
        assert net.feature_shape == (7, 6, 6)
        check_life(net, tmp_path)
        assert "mine:NAME" in describe_families()
        run(tmp_path / "run", net__name="mine:5", run__epochs=1)
    finally:
        del families.FAMILIES["mine"]
    with pytest.raises(td.TensorDropoutError, match="'monai' is a family already"):
        register_family("monai", build_mine)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet81", {}, r"unknown net 'resnet81', did you mean 'resnet18'\? There are: resnet-mini, .*, "
         r"torchvision:NAME, timm:NAME, monai:NAME, package.module:function"),
        ("monai:", {}, "unknown net 'monai:'"),
        ("monai:DensNet121", {}, "monai has no such network; did you mean DenseNet121"),
        ("monai:DenseNet", {"grow": 3}, "there is no option 'grow'; there are spatial_dims, in_channels"),
        ("monai:DenseNet", {"block_config": "many"}, "net monai:DenseNet: "),
        ("monai:DenseNet121", {"pretrained": True}, "would fetch weights each time .* --weights"),
        ("monai:EfficientNetBN", {}, "it needs model_name; give --set net.options.NAME=VALUE"),
        ("monai:DenseNet", {"act": nn.ReLU}, "options are JSON types"),
        ("torchvison:resnet18", {}, "ModuleNotFoundError: .* networks are resnet-mini, .*torchvision:NAME"),
        (f"{HERE}:nothing", {}, "AttributeError"),
        (f"{HERE}:no_net", {}, "made a int, not an nn.Module"),
        (f"{HERE}:HERE", {}, "that is a str, not a function"),
        (f"{HERE}:broken_net", {}, r"KeyError: 'no such layer' \(.*test_foreign_networks.py, line \d+\)"),
        (f"{HERE}:needs_more", {}, "it needs depth"),
        ("resnet18", {"width": 3}, "its one option is stem, got width"),
    ],
)  # fmt: skip
def test_mistakes_are_named(name, options, message):
    with pytest.raises(td.TensorDropoutError, match=message):
        build_net(name, outputs=3, input_shape=(1, 32, 32), options=options)


def test_a_stem_is_of_our_resnets():
    with pytest.raises(td.TensorDropoutError, match="there is no option 'stem'"):
        build_net("monai:DenseNet", outputs=3, input_shape=(1, 32, 32), stem="small")


def test_names_are_checked_before_anything_starts():
    with pytest.raises(td.TensorDropoutError, match="unknown net 'resnet81'"):
        configure(net__name="resnet81")
    assert configure(net__name="monai:Any", net__options={"a": 1}).net.settings()["options"] == {"a": 1}


@pytest.mark.parametrize("package", ["torchvision", "timm", "monai"])
def test_a_missing_package_is_one_sentence(package, monkeypatch):
    for module in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(td.TensorDropoutError, match=f"net {package}:some: .*{package} .*pip install") as caught:
        build_net(f"{package}:some", outputs=3, input_shape=(3, 64, 64))
    assert "\n" not in str(caught.value)


def test_a_broken_package_is_one_sentence(monkeypatch, tmp_path):
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist\\nmore')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    message = r"timm is installed but does not import \(RuntimeError: operator torchvision::nms does not exist\)"
    with pytest.raises(td.TensorDropoutError, match=message):
        build_net("timm:resnet18", outputs=3, input_shape=(3, 64, 64))


def test_loading_leaves_the_random_state_alone(tmp_path):
    net = build("DenseNet-2d")
    td.save(net, tmp_path / "net.safetensors")
    state = torch.get_rng_state()
    td.load(tmp_path / "net.safetensors")
    assert torch.equal(torch.get_rng_state(), state)


def needs_numbers(in_channels, num_classes):
    """Asks a tensor for a number while it is made, which the meta device cannot answer."""
    rate = torch.linspace(0, 0.5, 3)[1].item()
    return nn.Sequential(
        nn.Conv2d(in_channels, 6, 3),
        nn.Dropout2d(rate),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, num_classes),
    )


def test_a_network_that_cannot_be_made_without_numbers_is_saved(tmp_path):
    net = build_net(f"{HERE}:needs_numbers", outputs=3, input_shape=(1, 8, 8), head="rtrl-tt")
    check_life(net, tmp_path)
    assert not any(tensor.is_meta for tensor in build_network(net.settings).state_dict().values())


# torchvision and timm, where they import (the machine with the GPU).


def import_or_skip(package):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module(package)
        except (ImportError, RuntimeError, AttributeError, OSError) as error:
            pytest.skip(f"{package} does not import here: {error}")


@pytest.mark.parametrize(("package", "name"), [(package, name) for package, names in OTHERS.items() for name in names])
def test_networks_of_other_packages(package, name, tmp_path):
    import_or_skip(package)
    options = OPTIONS.get(name, {})
    net = build_net(f"{package}:{name}", outputs=5, input_shape=(3, 64, 64), head="rtrl-cp", rank=4, options=options)
    assert len(net.feature_shape) == 3
    assert net.feature_shape[1] >= 2
    check_life(net, tmp_path)


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_our_resnet_and_theirs_are_one(package, tmp_path):
    import_or_skip(package)
    ours = build_net("resnet18", outputs=5, input_shape=(3, 96, 96), stem="large").eval()
    theirs = build_net(f"{package}:resnet18", outputs=5, input_shape=(3, 96, 96)).eval()
    save_file({f"{key}": value for key, value in ours.state_dict().items()}, tmp_path / "ours.safetensors")
    load_backbone(theirs, load_file(tmp_path / "ours.safetensors"))
    x = make_batch(ours)
    assert_close(theirs.forward_features(x), ours.forward_features(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_they_train_on_pictures(package, tmp_path):
    import_or_skip(package)
    net = build_net(f"{package}:resnet18", outputs=10, input_shape=(3, 32, 32))
    x, y = torch.randn(8, 3, 32, 32), torch.arange(8)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(map(torch.isfinite, map(torch.tensor, losses)))


def test_channels_that_torchvision_does_not_take():
    import_or_skip("torchvision")
    with pytest.raises(td.TensorDropoutError, match="pictures of 3 channels, got 1; timm:NAME and monai:NAME"):
        build_net("torchvision:resnet18", outputs=5, input_shape=(1, 64, 64))


def test_prefixes_of_families():
    assert find_family("timm:resnet18")[0].module == "from_timm"
    assert [find_family(name)[1] for name in ("resnet18", "timm:resnet18", "a.b:c")] == [
        "resnet18",
        "resnet18",
        "a.b:c",
    ]


def test_a_trusted_module_lends_only_its_own_functions_to_files(monkeypatch):
    monkeypatch.setattr(families, "_TRUSTED", {HERE})
    settings = {"builder": "lab", "outputs": 3, "input_shape": [1, 8, 8], "head": "fc", "options": {"command": "true"}}
    for place in ("subprocess.run", "nn.Linear", "explain"):
        with pytest.raises(td.TensorDropoutError, match="a file must not decide what code is run"):
            build_network({**settings, "name": f"{HERE}:{place}"})
