"""One pass: what a network's prediction takes with its interval, by counted work and never by time."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import tensor_dropout as td
from tensor_dropout.calibration import regression
from tensor_dropout_lab.nets import build_net


class Written(TorchDispatchMode):
    """How many numbers operations write: a matrix product may be cheap, and what surrounds it is not."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = out if isinstance(out, tuple | list) else (out,)
            self.numbers += sum(tensor.numel() for tensor in tensors if isinstance(tensor, torch.Tensor))
        return out


def count(run):
    """Multiply-adds, and numbers written."""
    with FlopCounterMode(display=False) as products:
        run()
    with Written() as written:
        run()
    return products.get_total_flops() / 2, written.numbers


@pytest.mark.parametrize("format", ["cp", "tucker", "tt", "ring"])
@pytest.mark.parametrize("outputs", [1, 1000])
def test_a_prediction_with_its_variance_takes_a_fifth_more_work_at_most(format, outputs):
    net = build_net("resnet18", outputs=outputs, input_shape=(3, 64, 64), head=f"rtrl-{format}")
    net.eval().requires_grad_(False).to("meta")
    x = torch.empty(16, 3, 64, 64, device="meta")
    plain = count(lambda: td.predict(net, x))
    exact = count(lambda: td.predict(net, x, mode="exact", task="regression"))
    assert plain[0] < exact[0] <= 1.2 * plain[0]
    if format in ("cp", "tucker"):
        assert exact[1] <= 1.2 * plain[1]


@pytest.mark.parametrize(("batch", "form"), [(4, "rows"), (256, "outputs")])
def test_tucker_takes_the_product_with_fewer_multiply_adds(batch, form, monkeypatch):
    from tensor_dropout.layers import moments

    layer = td.TuckerRegression((64, 5, 5), 50, (32, 5, 5, 50), dropout=td.TensorDropout(0.8, modes="outer"))
    layer.requires_grad_(False).to("meta")
    x = torch.empty(batch, 64, 5, 5, device="meta")
    chosen, _ = count(lambda: layer.moments(x))
    assert moments.cheapest_tucker_form(batch, layer.core.shape, 50, layer.mask_moments(x)[:-1]) == form
    for other in {"rows", "outputs", "modes"} - {form}:
        monkeypatch.setattr(moments, "cheapest_tucker_form", lambda *_, other=other: other)
        assert count(lambda: layer.moments(x))[0] > chosen, other


def test_a_quantile_is_found_once_for_each_coverage(monkeypatch):
    asked = []
    find = regression.conformal_quantile
    monkeypatch.setattr(regression, "conformal_quantile", lambda *given: asked.append(given[2]) or find(*given))
    torch.manual_seed(0)
    layer = td.CPRegression((4, 3, 3), 2, rank=3, dropout=0.8)
    x = torch.randn(30, 4, 3, 3)
    calibration = td.calibrate(layer, x, torch.randn(30, 2))
    first, again = (td.predict(layer, x, coverage=0.9, calibration=calibration) for _ in range(2))
    narrow = td.predict(layer, x, coverage=0.5, calibration=calibration)
    torch.testing.assert_close((again.low, again.high), (first.low, first.high), rtol=0, atol=0)
    assert (narrow.high < first.high).all()
    assert asked == [0.9, 0.5]
    other = dataclasses.replace(calibration, errors=dataclasses.replace(calibration.errors))
    td.predict(layer, x, coverage=0.9, calibration=other)
    assert asked == [0.9, 0.5, 0.9]
