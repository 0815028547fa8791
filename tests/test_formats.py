"""The table of formats: what reads it, and that one file and one entry are enough for a new format."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

import tensor_dropout as td
from layers_under_test import FORMATS as TESTED
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers import formats
from tensor_dropout.layers.cp import CPRegression
from tensor_dropout.layers.formats import FORMATS, Format, find_layer, get_format, register_format
from tensor_dropout.layers.regression import TensorRegression
from tensor_dropout.sklearn import TensorRegressor
from tensor_dropout_lab.nets.heads import build_head


class ShortRegression(CPRegression):
    """A format of the tests: CP by another name."""

    @classmethod
    def default_rank(cls, input_shape, output_shape):
        return 2


@pytest.fixture
def short():
    register_format(Format("short", __name__, "ShortRegression"))
    yield
    del formats._FORMATS["short"]


def test_every_format_is_tested_and_has_its_layer_and_its_decomposition():
    assert {name: format.layer for name, format in FORMATS.items()} == TESTED
    for format in FORMATS.values():
        assert getattr(td, format.layer_name) is format.layer
        assert find_layer(format.layer_name) is format.layer
        assert format.decomposition(torch.ones(3, 2, dtype=torch.float64)).exact_rank


def test_the_table_costs_no_torch():
    code = "import sys, tensor_dropout.layers.formats as f; print(list(f.FORMATS), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == f"{list(FORMATS)} False"


@pytest.mark.parametrize("format", FORMATS)
def test_a_head_by_name_has_the_default_rank_and_modes_of_its_format(format):
    head = build_head(f"rtrl-{format}", (8, 4, 4), 10)
    assert type(head) is FORMATS[format].layer
    default = type(head).default_rank((8, 4, 4), (10,))
    assert head.rank == default
    assert head.dropout.modes == type(head).default_modes


def test_a_new_format_is_saved_and_loaded(short, tmp_path):
    layer = ShortRegression((4, 3), 2, 2, dropout=0.7)
    td.save(layer, tmp_path / "layer.safetensors")
    loaded = td.load(tmp_path / "layer.safetensors")
    assert type(loaded) is ShortRegression
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), layer.parameters(), strict=True))


def test_a_format_without_a_decomposition_is_refused_by_name(short):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    with pytest.raises(TensorDropoutError, match="the format 'short' has no decomposition"):
        td.tensorize_(net, torch.randn(2, 3, 4), factorization="short")
    assert isinstance(net[1], torch.nn.Linear)


def test_a_format_that_cannot_be_fitted_is_refused_by_name(short, monkeypatch):
    monkeypatch.setattr(ShortRegression, "finish_projection", TensorRegression.finish_projection, raising=False)
    x, y = np.random.default_rng(0).normal(size=(20, 4, 3)), np.arange(20.0)
    with pytest.raises(TensorDropoutError, match=r"ShortRegression cannot be fitted .*defines no finish_projection"):
        TensorRegressor("short", rank=2).fit(x, y)


def test_an_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(TensorDropoutError, match=r"factorization is one of tucker, cp, tt.*got 'svd'"):
        td.tensorize_(torch.nn.Linear(3, 2), torch.randn(2, 3), factorization="svd")
    with pytest.raises(TensorDropoutError, match=r"format is one of .*got 3"):
        get_format(3)


def test_a_name_can_be_taken_once(short):
    register_format(Format("short", __name__, "ShortRegression"))
    for format in (Format("cp", __name__, "ShortRegression"), Format("other", __name__, "CPRegression")):
        with pytest.raises(TensorDropoutError, match="clashes with the format 'cp'"):
            register_format(format)
    assert list(FORMATS) == [*TESTED, "short"]
