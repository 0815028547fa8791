"""What a step may minimize: the exact expected loss, the loss of attacked inputs; and θ over the epochs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import tensor_dropout as td
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data import load_data
from tensor_dropout_lab.data.base import StandardizeChannels
from tensor_dropout_lab.training.adversarial import Room, attack, find_room
from tensor_dropout_lab.training.execution import choose_speed
from tensor_dropout_lab.training.step import find_radius
from training_runs import configure, make_trainer, read_metrics, read_weights, run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def digits():
    return load_data("digits", augment=False)


# The expected loss.


@pytest.mark.parametrize("head", ["rtrl-cp", "rtrl-tucker", "rtrl-tt"])
def test_the_expected_loss_of_classes_is_the_library_s(tmp_path, digits, head):
    trainer = make_trainer(tmp_path, digits, net__head=head, run__loss="expected")
    x, y = digits.prepare(digits.train.inputs[:20]), digits.train.targets[:20]
    state = {name: tensor.clone() for name, tensor in trainer.plain.state_dict().items()}
    loss, counted = trainer.step.compute_loss(trainer.plain, x, y)
    trainer.plain.load_state_dict(state)
    assert_close(loss, td.expected_cross_entropy(trainer.plain, x, y))
    assert 0 <= int(counted) <= 20


def test_the_expected_loss_of_numbers_is_the_library_s(tmp_path):
    heads = load_data("phantom", n=24, size=(8, 8, 8), augment=False)
    trainer = make_trainer(
        tmp_path, heads, data__name="phantom", net__head="rtrl-cp", net__rank=4, run__loss="expected", run__batch=4
    )
    x, y = heads.prepare(heads.train.inputs[:6]), heads.train.targets[:6]
    loss, _ = trainer.step.compute_loss(trainer.plain, x, y)
    standardized = ((y.reshape(6, 1) - trainer.task_loss.mean) / trainer.task_loss.std).float()
    assert_close(loss, td.expected_mse(trainer.plain, x, standardized), rtol=1e-3, atol=1e-4)


def test_a_run_by_the_expected_loss_draws_nothing_and_learns(tmp_path):
    options = {"net__head": "rtrl-cp", "run__loss": "expected", "run__epochs": 4, "data__options__augment": False}
    result = run(tmp_path / "a", **options)
    assert result["test"]["accuracy"] > 80
    torch.manual_seed(123)
    run(tmp_path / "b", **options)
    ours, theirs = read_weights(tmp_path / "a"), read_weights(tmp_path / "b")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# θ over the epochs.


def test_theta_moves_to_the_network_s_own_over_half_of_the_epochs(tmp_path, digits):
    trainer = make_trainer(
        tmp_path, digits, net__head="rtrl-cp", net__theta=0.6, run__epochs=8, schedule__theta_start=1.0
    )
    seen = []
    for epoch in range(9):
        trainer.set_theta(epoch)
        seen.append(round(float(trainer.plain.fc.dropout.theta), 6))
    assert seen == [1.0, 0.9, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6]


def test_an_average_of_weights_does_not_average_theta(tmp_path):
    options = {"net__head": "rtrl-cp", "net__theta": 0.5, "schedule__theta_start": 1.0, "schedule__theta_share": 1.0}
    run(tmp_path, run__epochs=3, run__ema=0.999, **options)
    assert float(td.load(tmp_path / "model.safetensors").fc.dropout.theta) == 0.5


def test_a_run_with_a_schedule_over_all_epochs_ends_at_its_theta_and_goes_on_where_it_was(tmp_path, monkeypatch):
    options = {
        "net__head": "rtrl-cp",
        "net__theta": 0.5,
        "run__epochs": 3,
        "schedule__theta_start": 1.0,
        "schedule__theta_share": 1.0,
    }
    run(tmp_path / "whole", **options)
    assert [line["theta"] for line in read_metrics(tmp_path / "whole")] == [
        1.0,
        pytest.approx(5 / 6),
        pytest.approx(2 / 3),
    ]
    assert float(td.load(tmp_path / "whole/model.safetensors").fc.dropout.theta) == pytest.approx(0.5)
    from tensor_dropout_lab.training.loop import Trainer

    finish = Trainer.finish_epoch

    def stop(trainer, epoch):
        finish(trainer, epoch)
        if epoch == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "finish_epoch", stop)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "parts", **options)
    run(tmp_path / "parts", **options)
    assert read_metrics(tmp_path / "parts") == read_metrics(tmp_path / "whole")
    ours, theirs = read_weights(tmp_path / "parts"), read_weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# Attacked inputs.


def test_the_room_is_that_of_the_stored_images(digits):
    stored = digits.train.inputs[:5]
    prepared = digits.prepare(stored)
    room = find_room(stored, digits.prepare, 1.6, (0.0, 16.0))
    assert room.radius.shape == (5, 1, 1, 1)
    assert_close(room.radius.flatten(), 1.6 / stored.float().flatten(1).std(1, correction=0))
    assert_close(prepared.amin((1, 2, 3), keepdim=True), room.low, rtol=1e-4, atol=1e-4)  # every digit has some black
    at_most = stored.float().amax((1, 2, 3), keepdim=True)
    assert_close(prepared.amax((1, 2, 3), keepdim=True), room.high - (16 - at_most) * room.radius / 1.6)


def test_an_attack_stays_in_the_range_of_images(digits):
    stored = digits.train.inputs[:50]
    x = digits.prepare(stored)
    room = find_room(stored, digits.prepare, 1.6, (0.0, 16.0))
    moved = attack(x, room, lambda batch: (batch * torch.randn(1, 1, 8, 8)).sum())
    assert (moved >= room.low - 1e-5).all()
    assert (moved <= room.high + 1e-5).all()
    assert ((moved - x).abs() <= room.radius + 1e-5).all()
    assert (moved != x).float().mean() > 0.5


@pytest.mark.parametrize("contrast", [0, 2, 5, 60])
def test_fixed_channels_have_the_radius_that_was_asked_for(contrast):
    """Grey pictures, one of them black or of little contrast; each channel has a gain of its own."""
    torch.manual_seed(0)
    prepare = StandardizeChannels([124.0, 116.0, 104.0], [58.0, 57.0, 30.0])
    grey = (120 + torch.tensor([contrast, 60.0]).view(2, 1, 1, 1) * torch.randn(2, 1, 16, 16)).clamp(0, 255).round()
    stored = grey.expand(2, 3, -1, -1) * torch.tensor([float(contrast > 0), 1.0]).view(2, 1, 1, 1)
    x = prepare(stored)
    moved = attack(x, find_room(stored, prepare, 8.0, (0.0, 255.0)), torch.sum)
    back = moved / prepare.scale.view(1, 3, 1, 1) + prepare.mean.view(1, 3, 1, 1)
    assert_close((back - stored).abs().amax((2, 3)), torch.full((2, 3), 8.0), rtol=1e-3, atol=1e-3)
    assert back.min() > -1e-2
    assert back.max() < 255 + 1e-2


def test_a_preparation_that_does_not_say_its_scale_is_refused(digits):
    given = replace(digits, prepare=torch.nn.Flatten(0, 0))
    with pytest.raises(TensorDropoutError, match="its preparation Flatten has no method measure"):
        find_radius(configure(run__adversarial=0.1), given)
    assert find_radius(configure(run__adversarial=0.1), digits) == pytest.approx(1.6)


def test_a_fixed_scale_never_switches_the_attack_off():
    room = find_room(torch.zeros(1, 1, 2, 2), StandardizeChannels([4.0], [2.0]), 25.5, (0.0, 255.0))
    assert room.radius.item() == 12.75


def test_an_almost_constant_image_stays(digits):
    stored = digits.train.inputs[:4].clone()
    stored[0], stored[1] = 0, 0
    stored[1, 0, 3, 3] = 1
    x = digits.prepare(stored)
    room = find_room(stored, digits.prepare, 4.0, (0.0, 16.0))
    moved = attack(x, room, torch.sum)
    assert torch.equal(moved[:2], x[:2])
    assert_close(room.radius[2:].flatten(), 4 / stored[2:].float().flatten(1).std(1, correction=0))


def test_an_attack_stays_in_its_radius_and_raises_the_loss():
    torch.manual_seed(0)
    x, radius = torch.randn(50, 1, 4, 4), torch.full((50, 1, 1, 1), 0.1)
    radius[:10] = 0.3
    weight = torch.randn(16)

    def lose(moved):
        return (moved.flatten(1) @ weight).mean()

    moved = attack(x, Room(radius, torch.tensor(-torch.inf), torch.tensor(torch.inf)), lose)
    shift = (moved - x).flatten(1)
    assert (shift.abs() <= radius.flatten()[:, None] * (1 + 1e-5)).all()
    assert not moved.requires_grad
    wanted = radius.flatten()[:, None] * weight.sign()
    assert ((shift - wanted).abs() < 1e-6).float().mean() > 0.5  # 1.25 radii from a random start: most reach the edge
    assert lose(moved) > lose(x) + 0.7 * (radius.flatten().mean() * weight.abs().sum())


def test_training_on_attacks_withstands_them_better(tmp_path):
    from tensor_dropout.robustness.protocol import Budget
    from tensor_dropout_lab.evaluation.runs import RunSettings, evaluate_run

    left = {}
    for radius in (None, 0.15):
        folder = tmp_path / str(radius)
        run(folder, net__head="fc", run__epochs=8, **({} if radius is None else {"run__adversarial": radius}))
        settings = RunSettings(
            protocol="adaptive", budgets=(Budget("0.15", 0.15),), noise=("none",), steps=10, queries=20, twin_epochs=0
        )
        record, _, _ = evaluate_run(folder, settings, images=100)
        left[radius] = record["summary"]["worst_case"][0]["adaptive"]["accuracy"]
    assert left[0.15] > left[None] + 10


def test_speeds_of_attacked_training(digits):
    config = configure(net__head="fc", run__adversarial=0.1)
    assert choose_speed(config, digits, torch.device("cuda"), 1, 10**9) == "graph"
    with pytest.raises(TensorDropoutError, match="cannot be compiled"):
        choose_speed(configure(run__adversarial=0.1, run__speed="compile"), digits, CPU, 1, 100)


def test_smoothed_labels_without_labels_are_refused_before_a_folder_is_made(tmp_path):
    few = {"n": 40, "size": [16, 20, 16]}
    with pytest.raises(TensorDropoutError, match="label_smoothing is for classes, and phantom has none"):
        run(tmp_path / "run", data__name="phantom", data__options=few, net__head="fc", run__label_smoothing=0.1)
    assert not (tmp_path / "run").exists()


def test_a_share_of_no_range_is_refused(tmp_path):
    with pytest.raises(TensorDropoutError, match="a share of the inputs' range, and synthetic has none"):
        run(tmp_path / "run", data__name="synthetic", net__head="fc", run__adversarial=0.1,
            data__options__shape=[1, 8, 8])  # fmt: skip
    assert not (tmp_path / "run").exists()


# Settings.


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"run__loss": "expected", "net__head": "fc"}, 'run.loss="expected" needs a head with tensor dropout'),
        ({"schedule__theta_start": 1.0, "net__head": "trl-cp"}, "schedule.theta_start needs a head with tensor"),
        ({"run__adversarial": 0.1, "run__sharding": "fsdp"}, 'run.adversarial needs run.sharding="ddp"'),
    ],
)
def test_settings_that_do_not_fit_are_refused(overrides, message):
    with pytest.raises(TensorDropoutError, match=message):
        configure(**overrides)


def test_a_run_of_a_version_without_a_key_goes_on(tmp_path):
    run(tmp_path, net__head="fc", run__epochs=1)
    record = json.loads((tmp_path / "run.json").read_text())
    for key in ("run.loss", "schedule.theta_share"):
        del record["settings"][key]
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert run(tmp_path, net__head="fc", run__epochs=1)["epochs"] == 1
    with pytest.raises(TensorDropoutError, match=r"holds a run with run\.adversarial=its default, this one has 0\.1"):
        run(tmp_path, net__head="fc", run__epochs=1, run__adversarial=0.1)


def test_low_rank_head_has_the_output_variance_of_a_linear_one():
    from tensor_dropout_lab.nets.heads import LowRankLinear

    torch.manual_seed(0)
    x = torch.randn(4000, 64)
    with torch.no_grad():
        spreads = [float(LowRankLinear(64, 32, rank)(x).var()) for rank in (2, 8, 32)]
        plain = float(torch.nn.Linear(64, 32)(x).var())
    assert all(0.5 < spread / plain < 2 for spread in spreads)
