"""Prediction with uncertainty: the three modes against each other."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensor_dropout as td


def make_network(outputs=5, *, inside=None, **dropout):
    torch.manual_seed(0)
    head = td.TuckerRegression((4, 3, 3), outputs, "full", init="normal", dropout=td.TensorDropout(0.7, **dropout))
    return nn.Sequential(nn.Conv2d(2, 4, 3), inside or nn.BatchNorm2d(4), head)


X = torch.randn(6, 2, 5, 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("at_test", ["mean", "sample"])
def test_mean_is_the_deterministic_network_in_eval_mode(at_test):
    net = make_network(at_test=at_test)
    prediction = td.predict(net, X)
    net.eval()
    net[2].dropout.at_test = "mean"
    torch.testing.assert_close(prediction.mean, net(X))
    torch.testing.assert_close(prediction.probs, net(X).softmax(-1))
    assert prediction.std is None
    assert prediction.mutual_information is None


@pytest.mark.parametrize("law", ["bernoulli", "replacement", "gaussian", "nested"])
def test_exact_agrees_with_many_samples(law):
    net = make_network(law=law)
    exact, sampled = td.predict(net, X, mode="exact", n_samples=800), td.predict(net, X, mode="sample", n_samples=800)
    error = sampled.std / 800**0.5
    assert ((exact.mean - sampled.mean).abs() < 6 * error).all()
    torch.testing.assert_close(exact.std, sampled.std, rtol=0.2, atol=1e-3)
    torch.testing.assert_close(exact.probs, sampled.probs, atol=0.05, rtol=0)
    torch.testing.assert_close(exact.entropy, sampled.entropy, atol=0.05, rtol=0)
    torch.testing.assert_close(exact.mutual_information, sampled.mutual_information, atol=0.03, rtol=0.1)


def test_std_is_the_root_of_the_exact_variance_in_the_units_of_the_output():
    net = make_network(1)
    prediction = td.predict(net, X, mode="exact")
    net.eval()
    torch.testing.assert_close(prediction.std, net[2].moments(net[:2](X)).variance.sqrt())
    with torch.no_grad():
        for parameter in (net[2].core, net[2].bias):
            parameter.mul_(10)
    torch.testing.assert_close(td.predict(net, X, mode="exact").std, 10 * prediction.std)


def test_probabilities_entropy_and_mutual_information_are_what_they_say():
    net = make_network()
    torch.manual_seed(1)
    prediction = td.predict(net, X, mode="sample", n_samples=50)
    torch.manual_seed(1)
    net.eval()
    net[2].dropout.at_test = "sample"
    probs = torch.stack([net(X).softmax(-1) for _ in range(50)])
    average = probs.mean(0)
    entropy = -(average * average.log()).sum(-1)
    information = entropy + (probs * probs.log()).sum(-1).mean(0)
    torch.testing.assert_close(prediction.probs, average)
    torch.testing.assert_close(prediction.entropy, entropy)
    torch.testing.assert_close(prediction.mutual_information, information, atol=1e-6, rtol=1e-4)
    assert (information > 0).all()


@pytest.mark.parametrize("mode", ["mean", "sample", "exact"])
def test_the_task_decides_what_is_returned(mode):
    for outputs, task, classes in ((5, None, True), (1, None, False), (5, "regression", False), ((2, 2), None, False)):
        prediction = td.predict(make_network(outputs), X, mode=mode, task=task, n_samples=4)
        assert (prediction.probs is not None) == classes


@pytest.mark.parametrize("mode", ["mean", "sample", "exact"])
def test_the_network_is_left_as_it_was(mode):
    net = make_network()
    net[1].eval()
    before = {name: module.training for name, module in net.named_modules()}
    state = {name: value.clone() for name, value in net.state_dict().items()}
    prediction = td.predict(net, X, mode=mode, n_samples=4)
    assert {name: module.training for name, module in net.named_modules()} == before
    assert net[2].dropout.at_test == "mean"
    assert not prediction.mean.requires_grad
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


class AlwaysDropping(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, training=True)


def test_exact_refuses_randomness_before_the_head_and_offers_sampling():
    net = make_network(inside=AlwaysDropping())
    with pytest.raises(td.TensorDropoutError, match=r"draws random numbers before its last layer.*use mode='sample'"):
        td.predict(net, X, mode="exact")
    td.predict(net, X, mode="sample", n_samples=4)
    first = td.TuckerRegression((4, 3, 3), (4, 3, 3), "full", dropout=0.5)
    with pytest.raises(td.TensorDropoutError, match=r"2 of them with dropout; use td.predict\(mode='sample'\)"):
        td.predict(make_network(inside=first), X, mode="exact")


def test_ordinary_dropout_is_at_rest_and_does_not_count():
    prediction = td.predict(make_network(inside=nn.Dropout(0.5)), X, mode="exact")
    again = td.predict(make_network(inside=nn.Dropout(0.5)), X, mode="exact")
    assert torch.equal(prediction.std, again.std)


@pytest.mark.parametrize("mode", ["sample", "exact"])
def test_a_network_without_dropout_has_nothing_to_average(mode):
    with pytest.raises(td.TensorDropoutError, match="nothing to average; use mode='mean'"):
        td.predict(nn.Sequential(td.CPRegression((4, 3), 2, 3)), torch.zeros(2, 4, 3), mode=mode)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "median"}, "mode is 'mean', 'sample' or 'exact', got 'median'"),
        ({"task": "ranking"}, "task is 'classification', 'regression' or None"),
        ({"n_samples": 1}, "n_samples is an integer of at least 2, got 1"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(td.TensorDropoutError, match=message):
        td.predict(make_network(), X, **change)


def test_compiled_networks_are_looked_through():
    net = make_network()
    compiled = torch.compile(net, backend="aot_eager")
    torch.testing.assert_close(td.predict(compiled, X, mode="exact").std, td.predict(net, X, mode="exact").std)


def make_ages(dtype):
    """Ages near 70 years with a spread of weeks: in bfloat16 numbers there are half a year apart."""
    torch.manual_seed(0)
    head = td.CPRegression((6, 3, 3), 1, rank=4, dropout=0.9)
    nn.init.constant_(head.bias, 70.0)
    return nn.Sequential(nn.Conv2d(2, 6, 3), head).to(dtype), X.to(dtype)


@pytest.mark.parametrize("ending", [nn.Identity(), nn.Flatten(0)], ids=["head", "reshape"])
@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
def test_the_spread_of_samples_is_not_the_rounding_of_half_precision(precision, ending):
    net, x = make_ages(torch.bfloat16 if precision == "bfloat16" else torch.float32)
    whole = nn.Sequential(*net, ending)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        exact = td.predict(net, x, mode="exact")
        sampled = td.predict(whole, x, mode="sample", n_samples=800)
        plain = whole.eval()(x)
    assert plain.dtype == torch.bfloat16  # the network itself is left as it was
    assert sampled.std.dtype == torch.float32
    torch.testing.assert_close(sampled.std.flatten(), exact.std.flatten(), rtol=0.2, atol=0)
    assert ((sampled.mean - 70).abs() > 0).all()


def test_sampling_goes_on_where_a_later_layer_takes_half_precision_only():
    head = td.CPRegression((4, 3, 3), 5, 6, init="normal", dropout=0.7)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), head, nn.Linear(5, 2)).bfloat16()
    sampled = td.predict(net, X.bfloat16(), mode="sample", task="regression")
    assert sampled.std.dtype == torch.bfloat16
    assert (sampled.std > 0).all()


@pytest.mark.parametrize("mode", ["sample", "exact"])
def test_asking_about_all_masks_while_they_are_fixed_is_refused(mode):
    net = make_network()
    with td.fixed_masks(net):
        td.predict(net, X)
        with pytest.raises(td.TensorDropoutError, match=r"are fixed; call it outside td\.fixed_masks"):
            td.predict(net, X, mode=mode)
    assert (td.predict(net, X, mode=mode).std > 0).all()


def test_threads_take_turns():
    net = make_network()
    found = {"mean": [], "sample": []}

    def ask(mode):
        for _ in range(30):
            found[mode].append(td.predict(net, X, mode=mode))

    threads = [threading.Thread(target=ask, args=(mode,)) for mode in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(each.mean, found["mean"][0].mean) for each in found["mean"])
    exact = td.predict(net, X, mode="exact").std
    assert all((each.std > 0.3 * exact).all() for each in found["sample"])
    assert net[-1].dropout.at_test == "mean"
