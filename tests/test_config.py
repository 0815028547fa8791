"""Configs: what is said is taken, what cannot be is refused in one sentence with the nearest valid name."""

from __future__ import annotations

import tomllib
from types import UnionType
from typing import Literal, get_args, get_origin

import pytest
import torch
from typer.testing import CliRunner

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab import cli
from tensor_dropout_lab.data import DATASETS, describe_options
from tensor_dropout_lab.training import loop
from tensor_dropout_lab.training.config import Config, parse_value, resolve_config, write_toml
from tensor_dropout_lab.training.optimizers import OPTIMIZERS, Optimizer, make_optimizer, register_optimizer
from tensor_dropout_lab.training.schedule import SCHEDULES, Schedule, rate_at, register_schedule

runner = CliRunner()


def resolve(**overrides):
    return resolve_config(overrides={key.replace("__", "."): value for key, value in overrides.items()})


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


# What is said.


def test_the_order_is_data_then_file_then_command_line(tmp_path):
    file = write(tmp_path / "a.toml", '[data]\nname = "cifar10"\n[run]\nepochs = 7\n[optimizer]\nlr = 1.0\n')
    config = resolve_config(file, {"run.epochs": 9})
    assert config.run.epochs == 9
    assert config.optimizer.lr == 1.0
    assert config.optimizer.name == "sgd"  # CIFAR's default
    assert config.run.batch == 128
    assert resolve_config().run.batch == 64


@pytest.mark.parametrize("name", DATASETS)
def test_the_defaults_of_every_data_set_are_valid(name):
    config = resolve(data__name=name)
    assert DATASETS[name].defaults["run"]["epochs"] > 1
    for table, keys in DATASETS[name].defaults.items():
        for key, value in keys.items():
            assert getattr(getattr(config, table), key) == value


EVERYTHING = {
    "data.name": "phantom",
    "data.root": 'C:\\a folder "of" mine',
    "data.seed": 3,
    "data.options": {"size": [16, 20, 16], "augment": False, "ages": [20.5, 80.0], "n": 30},
    "net.name": "resnet18",
    "net.head": "rtrl-tucker",
    "net.stem": "small",
    "net.rank": [4, 2, 2, 2, 1],
    "net.theta": 0.9,
    "net.law": "gaussian",
    "net.modes": [0, 1],
    "net.per_sample": True,
    "net.scaling": "paper",
    "net.min_rank": 1,
    "net.init": "normal",
    "optimizer.name": "sgd",
    "optimizer.lr": 1e-5,
    "optimizer.weight_decay": 0.0,
    "optimizer.factor_lr": 2e-7,
    "optimizer.factor_decay": 0.1,
    "optimizer.nesterov": True,
    "optimizer.clip": 1.0,
    "schedule.name": "step",
    "schedule.milestones": [2, 4],
    "run.epochs": 5,
    "run.ema": 0.999,
    "run.label_smoothing": 0.1,
    "run.checkpoint_every": 10,
    "run.threads": 2,
    "run.tensorboard": True,
}


def test_what_is_written_is_what_is_read(tmp_path):
    config = resolve_config(overrides=EVERYTHING)
    assert resolve_config(write(tmp_path / "a.toml", write_toml(config))) == config


@pytest.mark.parametrize("name", DATASETS)
def test_a_setting_that_is_taken_away_stays_away(tmp_path, name):
    """TOML has no none: what can be none must be none by default, or it comes back."""
    for table, section in Config.model_fields.items():
        for key, field in section.annotation.model_fields.items():
            if type(None) in get_args(field.annotation):
                config = resolve_config(overrides={"data.name": name, f"{table}.{key}": None})
                assert resolve_config(write(tmp_path / "a.toml", write_toml(config))) == config, f"{table}.{key}"


@pytest.mark.parametrize("value", [None, "two\nlines", "a\ttab", "θ = 0.8", 'say "no"', "back\\slash", ""])
def test_any_option_of_the_data_can_be_written(tmp_path, value):
    config = resolve_config(overrides={"data.name": "nifti", "data.options.provenance": value})
    again = resolve_config(write(tmp_path / "a.toml", write_toml(config)))
    assert again.data.options.get("provenance") == value


# What cannot be.

BAD = {
    "[rn]\nepochs = 3": ["[rn]", "'run'"],
    "[run]\nepoch = 3": ["run.epoch", "'epochs'"],
    "[optimizer]\nlearning_rate = 0.1": ["optimizer.learning_rate", "known are", "lr"],
    "[net]\ntheta_ = 0.5": ["net.theta_", "'theta'"],
    "[run]\nepochs = 3.5": ["run.epochs", "3.5"],
    '[run]\nepochs = "3"': ["run.epochs", "'3'"],
    "[run]\nepochs = true": ["run.epochs", "True"],
    "[run]\nepochs = 0": ["run.epochs", "0"],
    "[run]\nbatch = -1": ["run.batch", "-1"],
    "[run]\nema = 1.0": ["run.ema", "less than 1"],
    "[run]\nlabel_smoothing = 1.0": ["run.label_smoothing"],
    '[run]\nprecision = "fp16"': ["run.precision", "'bf16'", "'fp16'"],
    '[optimizer]\nname = "lion"': ["optimizer.name", "'sgd'", "'lion'"],
    "[optimizer]\nlr = 0.0": ["optimizer.lr", "greater than 0"],
    "[optimizer]\nlr = nan": ["optimizer.lr"],
    "[optimizer]\nlr = inf": ["optimizer.lr"],
    "[optimizer]\nmomentum = 1.0": ["optimizer.momentum"],
    '[optimizer]\nname = "sgd"\nnesterov = true\nmomentum = 0.0': ["optimizer.nesterov", "momentum"],
    "[schedule]\nwarmup = 1.0": ["schedule.warmup"],
    '[schedule]\nname = "step"\nmilestones = [99]': ["schedule.milestones", "run.epochs=20"],
    '[schedule]\nname = "step"\nmilestones = [-1]': ["schedule.milestones"],
    '[schedule]\nname = "step"\nmilestones = ["1"]': ["schedule.milestones"],
    '[schedule]\nname = "step"\nmilestones = [5, 3]': ["schedule.milestones", "increase", "[5, 3]"],
    '[schedule]\nname = "step"\nmilestones = [5, 5]': ["schedule.milestones", "increase", "[5, 5]"],
    '[run]\nsharding = "fsdp"\nema = 0.9': ["run.ema", "ddp"],
    '[data]\nname = "digit"': ["data.name", "'digits'"],
    "[data]\nname = 5": ["data.name", "5"],
    '[data]\nname = ["digits"]': ["data.name"],
    "data = 5": ["data"],
    "run = 5": ["[run]", "table"],
    "[data.options]\naugmnt = true": ["data.options.augmnt", "'augment'"],
    '[data.options]\naugment = "maybe"': ["augment"],
    "[data]\noptions = 3": ["data.options"],
    '[net]\nstem = "smal"': ["net.stem", "'small'"],
    '[net]\nrank = "fulll"': ["net.rank", "full", "'fulll'"],
    "[net]\nrank = [1.5, 2]": ["net.rank"],
    "[run]\nseed = -1": ["run.seed"],
    "[run]\nseed = 100000000000000000000": ["seed"],
}


@pytest.mark.parametrize("text", BAD)
def test_a_config_that_cannot_be_is_refused_in_one_sentence(tmp_path, text):
    with pytest.raises(TensorDropoutError) as failure:
        resolve_config(write(tmp_path / "bad.toml", text))
    message = str(failure.value)
    assert "\n" not in message
    assert [part for part in BAD[text] if part not in message] == []


@pytest.mark.parametrize("text", BAD)
def test_it_is_refused_on_the_command_line_before_a_folder_is_made(tmp_path, text):
    file = write(tmp_path / "bad.toml", text)
    result = runner.invoke(cli.app, ["train", str(file), "--out", str(tmp_path / "run")])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.output.startswith("Error: ")
    assert result.output.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--set", "run.epochs"], ["KEY=VALUE", "'run.epochs'"]),
        (["--set", "run.epoch=3"], ["run.epoch", "'epochs'"]),
        (["--set", "epochs=3"], ["epochs", "run"]),
        (["--epochs", "three"], ["run.epochs", "'three'"]),
        (["--theta", "1.5"], ["theta", "1.5"]),
        (["--rank", "0"], ["rank", "0"]),
        (["--rank", "5,5"], ["rank", "5, 5"]),
        (["--rank", "100000"], ["rank", "100000", "40"]),
        (["--head", "rtrl-pc"], ["'rtrl-pc'", "'rtrl-cp'"]),
        (["--head", "fc", "--theta", "0.5"], ["'fc'", "theta"]),
        (["--net", "resnet-min"], ["'resnet-min'", "'resnet-mini'"]),
        (["--net", "resnet18", "--set", "net.stem=large"], ["resnet18", "large"]),
        (["--law", "bernouli"], ["'bernouli'", "bernoulli"]),
        (["--data", "phantm"], ["'phantm'", "'phantom'"]),
        (["--root", "somewhere"], ["digits", "root"]),
        (["--target", "age"], ["digits has no target", "'age'", "--target"]),
        (["--device", "tpu"], ["device", "'tpu'"]),
        (["--data", "phantom", "--set", "data.options.n=0"], ["phantom", "n "]),
        (["--data", "phantom", "--set", "data.options.n=many"], ["n ", "many"]),
        (["--data", "phantom", "--set", "data.options.ages=20"], ["ages", "20"]),
        (["--data", "phantom", "--set", "data.options.size=8"], ["size", "8"]),
        (["--data", "synthetic", "--set", "data.options.noise=loud"], ["noise", "loud"]),
        (["--data", "nifti", "--root", "nowhere"], ["nowhere", "participants.tsv"]),
        (["--data", "imagefolder", "--root", "nowhere"], ["nowhere", "ROOT/train/CLASS"]),
        (["--data", "nifti"], ["root", "participants.tsv"]),
        (["nowhere.toml"], ["nowhere.toml", "No such file"]),
        (["."], ["."]),
    ],
)
def test_a_command_that_cannot_be(tmp_path, monkeypatch, arguments, parts):
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(cli.app, ["train", *arguments])
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (1, 2)
    assert [part for part in parts if part not in result.output] == [], result.output
    assert result.output.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_names_are_checked_before_data_are_made(tmp_path, monkeypatch):
    """A thousand volumes take a while: a misspelt head is said at once."""

    def load(*arguments, **options):
        raise AssertionError("the data were loaded first")

    monkeypatch.setattr(loop, "load_data", load)
    for arguments in (["--head", "rtrl-pc"], ["--net", "resnet81"], ["--head", "fc", "--theta", "0.5"]):
        result = runner.invoke(cli.app, ["train", "--data", "phantom", *arguments, "--out", str(tmp_path / "run")])
        assert isinstance(result.exception, SystemExit), arguments
        assert result.exit_code == 1


@pytest.mark.parametrize("content", [b"[run\nepochs = 3", b"\xff\xfe\x00", b"run.epochs = 3\nrun = 4", b"a = 1 b = 2"])
def test_a_file_that_is_not_toml(tmp_path, content):
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(TensorDropoutError, match=r"bad.toml is not TOML") as failure:
        resolve_config(file)
    assert "\n" not in str(failure.value)


# The command line's values.


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("run.epochs", "3", 3),
        ("run.tensorboard", "true", True),
        ("run.tensorboard", "False", False),
        ("run.ema", "none", None),
        ("run.ema", "0.99", 0.99),
        ("run.device", "cuda:1", "cuda:1"),
        ("run.device", "1", "1"),
        ("run.threads", "2", 2),
        ("run.checkpoint_seconds", "30", 30.0),
        ("run.precision", "bf16", "bf16"),
        ("optimizer.lr", "1", 1.0),
        ("optimizer.lr", "5e-4", 5e-4),
        ("optimizer.clip", "none", None),
        ("optimizer.name", "sgd", "sgd"),
        ("schedule.milestones", "30", [30]),
        ("schedule.milestones", "30,60", [30, 60]),
        ("schedule.milestones", "30, 60,", [30, 60]),
        ("schedule.milestones", "[30, 60]", [30, 60]),
        ("schedule.milestones", "[30]", [30]),
        ("net.rank", "[16,3,3,10]", [16, 3, 3, 10]),
        ("net.modes", "[0, 3]", [0, 3]),
        ("data.options.size", " [16, 20, 16]", [16, 20, 16]),
        ("data.options.target", '["age", "iq"]', ["age", "iq"]),
        ("data.options.provenance", "[Ours", "[Ours"),
        ("data.options.provenance", "[Ours]", "[Ours]"),
        ("net.rank", "64", 64),
        ("net.rank", "0.25", 0.25),
        ("net.rank", "full", "full"),
        ("net.rank", "128,3,3,96", [128, 3, 3, 96]),
        ("net.rank", "none", None),
        ("net.theta", "1", 1.0),
        ("net.modes", "all", "all"),
        ("net.modes", "outer", "outer"),
        ("net.modes", "0", [0]),
        ("net.modes", "0,2", [0, 2]),
        ("net.head", "fc", "fc"),
        ("net.law", "none", None),
        ("data.root", "/a/b,c", "/a/b,c"),
        ("data.root", "007", "007"),
        ("data.name", "digits", "digits"),
        ("data.options.size", "16,20,16", [16, 20, 16]),
        ("data.options.augment", "false", False),
        ("data.options.provenance", "Ours, of 2024.", "Ours, of 2024."),
        ("data.options.images", "**/*.nii", "**/*.nii"),
        ("data.options.resample", "2.5", 2.5),
        ("data.options.crop", "none", None),
        ("data.options.target", "age", "age"),
    ],
)
def test_values_of_the_command_line(key, text, value):
    found = parse_value(key, text)
    assert (found, type(found)) == (value, type(value))


def example_of(annotation):
    """A text that a key of this type takes."""
    if get_origin(annotation) in (UnionType,) or str(get_origin(annotation)) == "typing.Union":
        return example_of(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return get_args(annotation)[0]
    return {int: "1", float: "0.5", bool: "true", str: "cpu"}.get(annotation, "1,2")


KEYS = [
    (f"{table}.{name}", example_of(key.annotation))
    for table, section in Config.model_fields.items()
    for name, key in section.annotation.model_fields.items()
    if name not in ("options",)
]


def test_milestones_of_a_schedule_that_has_none_are_refused():
    with pytest.raises(TensorDropoutError, match="not of 'one-cycle'"):
        resolve_config(overrides={"schedule.milestones": [3], "run.epochs": 10})


def test_the_keys_say_which_optimizers_and_schedules_there_are():
    lines = runner.invoke(cli.app, ["train", "--keys"]).output.splitlines()
    shown = [line.partition(" # ")[2] for line in lines if line.startswith("name = ")]
    assert shown[-2:] == ["'sgd' | 'adam' | 'adamw'", "'constant' | 'step' | 'cosine' | 'one-cycle'"]


def test_a_schedule_and_an_optimizer_of_one_s_own(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "linear", Schedule(lambda settings, step, steps, per_epoch: 1 - step / steps))
    monkeypatch.setitem(OPTIMIZERS, "adagrad", Optimizer(lambda groups, settings, on_gpu: torch.optim.Adagrad(groups)))
    config = resolve_config(overrides={"schedule.name": "linear", "optimizer.name": "adagrad", "optimizer.lr": 0.5})
    assert rate_at(config.schedule, 3, 4, 2) == 0.25
    optimizer = make_optimizer(torch.nn.Linear(2, 2), config.optimizer, torch.device("cpu"))
    assert type(optimizer) is torch.optim.Adagrad
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}
    with pytest.raises(TensorDropoutError, match="nesterov is for sgd"):
        resolve_config(overrides={"optimizer.name": "adagrad", "optimizer.nesterov": True})
    for register, table in ((register_schedule, SCHEDULES), (register_optimizer, OPTIMIZERS)):
        taken, other, *_ = table
        with pytest.raises(TensorDropoutError, match=f"the name '{taken}' is taken"):
            register(taken, table[other])


def test_targets_are_names_whatever_they_look_like():
    said = {text: parse_value("data.options.target", text) for text in ("age", "2024", "true", "age, sex")}
    assert said == {"age": "age", "2024": "2024", "true": "true", "age, sex": ["age", "sex"]}


SETTABLE = ["--set", "run.epochs=10", "--set", "optimizer.name=sgd"]  # what some of the values need


@pytest.mark.parametrize(("key", "text"), KEYS)
def test_every_key_can_be_set_on_the_command_line(key, text):
    names = {"data": "phantom", "net": "resnet18", "optimizer": "adam", "schedule": "cosine"}
    text = {f"{table}.name": name for table, name in names.items()}.get(key, "fc" if key == "net.head" else text)
    needed = ["--set", "schedule.name=step"] if key == "schedule.milestones" else []
    arguments = ["train", "--keys", *SETTABLE, *needed, "--set", f"{key}={text}"]
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    shown = tomllib.loads(result.output)
    table, name = key.split(".")
    assert shown[table][name] == parse_value(key, text)


@pytest.mark.parametrize("name", DATASETS)
def test_keys_lists_every_key_and_the_options_of_the_data(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(cli.app, ["train", "--data", name, "--keys"])
    assert result.exit_code == 0
    for table, section in Config.model_fields.items():
        for key in section.annotation.model_fields:
            assert key in result.output, f"{table}.{key}"
    for option in describe_options(name):
        assert f"#   {option}: " in result.output
    tomllib.loads(result.output)
    assert list(tmp_path.iterdir()) == []


def test_keys_say_what_a_key_that_is_not_set_comes_to():
    def lines(head):
        output = runner.invoke(cli.app, ["train", "--head", head, "--keys"]).output.splitlines()
        return {" ".join(line.split()) for line in output}

    assert lines("rtrl-cp") >= {
        "# rank = (not set: half the channels; of fc+low-rank at most half the outputs) # int | float | list[int]"
        " | 'full' | none",
        "# theta = (not set: 0.9) # float | none",
        "# law = (not set: bernoulli) # str | none",
        "# drop_rate: not of the head rtrl-cp # float | none",
        "milestones = [] # list[int]",
    }
    assert "# theta: not of the head fc # float | none" in lines("fc")


def test_short_options_are_keys():
    arguments = ["train", "--keys", "--data", "nifti", "--root", "r", "--target", "iq", "--net", "resnet34"]
    arguments += ["--head", "rtrl-tt", "--rank", "8", "--theta", "0.7", "--law", "nested", "--epochs", "4"]
    arguments += ["--batch", "6", "--lr", "0.01", "--seed", "5", "--device", "cpu"]
    shown = tomllib.loads(runner.invoke(cli.app, arguments).output)
    assert (shown["data"]["name"], shown["data"]["root"]) == ("nifti", "r")
    assert shown["net"] == {"name": "resnet34", "head": "rtrl-tt", "rank": 8, "theta": 0.7, "law": "nested"}
    assert (shown["run"]["epochs"], shown["run"]["batch"], shown["run"]["seed"]) == (4, 6, 5)
    assert shown["optimizer"]["lr"] == 0.01
