"""Requests that cannot be carried out: each raises TensorDropoutError with a message that says what to change.

Every table starts with a request that works; each row departs from it in one thing.
"""

from __future__ import annotations

import math
import re

import pytest
import torch

import tensor_dropout as td
from layers_under_test import FORMATS, every_format
from tensor_dropout import reference
from tensor_dropout.layers.laws import Bernoulli

GOOD_LAYER = {"input_shape": (8, 4, 4), "output_shape": 10}
GOOD_RANK = {"tucker": (4, 2, 2, 5), "cp": 6, "tt": (4, 4, 5), "ring": (2, 4, 4, 5)}
GOOD_DROPOUT = {"theta": 0.8}


def make(format, **changes):
    return FORMATS[format](**{**GOOD_LAYER, "rank": GOOD_RANK[format], **changes})


def drop(**changes):
    options = {**GOOD_DROPOUT, **changes}
    return td.TensorDropout(options.pop("theta"), **options)


def refused(*parts):
    """The message has all these parts, in this order."""
    return pytest.raises(td.TensorDropoutError, match=".*".join(map(re.escape, parts)))


def named(table):
    """Rows (argument.., message parts) as parameters with readable names."""
    return [pytest.param(*row, id="-".join(map(str, row[:-1]))[:70]) for row in table]


def test_the_exception_is_a_value_error():
    assert issubclass(td.TensorDropoutError, ValueError)


# Shapes.

TUPLE = "is a positive integer (1 for a scalar) or a tuple of them"
BAD_SHAPES = [
    ((), (TUPLE, "got ()")),
    (0, (TUPLE, "got 0")),
    (-3, (TUPLE, "got -3")),
    ((8, 0, 4), (TUPLE, "got (8, 0, 4)")),
    ((8, -4), (TUPLE, "got (8, -4)")),
    ((8, 4.0), (TUPLE, "got (8, 4.0)")),
    (8.0, (TUPLE, "got 8.0")),
    ((8, True), (TUPLE, "got (8, True)")),
    (True, (TUPLE, "got True")),
    ("84", (TUPLE, "got '84'")),
    (None, (TUPLE, "got None")),
]


@every_format
@pytest.mark.parametrize("shape", [5, (5,), [5, 4], torch.Size((5, 4)), (1,)], ids=str)
@pytest.mark.parametrize("name", ["input_shape", "output_shape"])
def test_good_shapes(format, name, shape):
    layer = make(format, rank=1, **{name: shape})
    assert getattr(layer, name) == ((shape,) if isinstance(shape, int) else tuple(shape))


@pytest.mark.parametrize("name", ["input_shape", "output_shape"])
@pytest.mark.parametrize(("shape", "message"), named(BAD_SHAPES))
@every_format
def test_bad_shapes(format, name, shape, message):
    with refused(f"{FORMATS[format].__name__}: {name} ", *message):
        make(format, **{name: shape})


@every_format
def test_at_most_twelve_modes(format):
    layer = make(format, input_shape=(2,) * 11, output_shape=1, rank=1, init="normal")
    x = torch.randn(2, *(2,) * 11)
    torch.testing.assert_close(layer(x), reference.regress(layer, x, layer.mean_masks()))
    with refused("at most 12 modes in all"):
        make(format, input_shape=(1,) * 12, output_shape=1, rank=1)


# Ranks.

KIND = "rank is 'full', an integer, a sequence of integers, or a float in (0, 1]"
BAD_RANKS = [
    (0, ("rank is between 1 and", "got 0")),
    (-2, ("rank is between 1 and", "got -2")),
    (1000, ("rank is between 1 and", "got 1000")),
    (0.0, ("fraction of the dense parameters in (0, 1]", "got 0.0", "write an integer")),
    (1.5, ("fraction of the dense parameters in (0, 1]", "got 1.5", "write an integer")),
    (-0.5, ("fraction of the dense parameters in (0, 1]", "got -0.5")),
    (math.nan, ("fraction of the dense parameters in (0, 1]", "got nan")),
    (math.inf, ("fraction of the dense parameters in (0, 1]", "got inf")),
    (1e-6, ("allows 0 parameters, but rank 1 already has", "at least")),
    (True, (KIND, "got True")),
    (None, (KIND, "got None")),
    ("half", (KIND, "got 'half'")),
    ("4", (KIND, "got '4'")),
]
BAD_RANK_TUPLES = [
    ("tucker", (4, 2, 2), ("rank needs 4 numbers, got 3: (4, 2, 2)",)),
    ("tucker", (), ("rank needs 4 numbers, got 0: ()",)),
    ("tucker", (4, 0, 2, 5), ("rank 0 at position 1 of (4, 0, 2, 5)", "between 1 and the full rank 4")),
    ("tucker", (4, 2, -2, 5), ("rank -2 at position 2",)),
    ("tucker", (9, 2, 2, 5), ("rank 9 at position 0", "between 1 and the full rank 8")),
    ("tucker", (4, 2, 2, 5.0), (KIND, "got (4, 2, 2, 5.0)")),
    ("tucker", (4, 2, 2, True), (KIND, "got (4, 2, 2, True)")),
    ("tucker", (4, 2, 2, "5"), (KIND, "got (4, 2, 2, '5')")),
    ("tt", (4, 4), ("rank needs 3 numbers, got 2: (4, 4)",)),
    ("tt", (4, 4, 11), ("rank 11 at position 2", "between 1 and the full rank 10")),
    ("ring", (4, 4, 4), ("rank needs 4 numbers, got 3: (4, 4, 4)",)),
    ("ring", (4, 4, 4, 33), ("rank 33 at position 3", "between 1 and the largest rank 32", "full rank (1, 8, 32, 10)")),
    ("cp", (6, 6), ("rank needs 1 numbers, got 2: (6, 6)",)),
    ("cp", (0,), ("rank 0 at position 0",)),
]


@every_format
def test_good_rank(format):
    assert make(format).rank == GOOD_RANK[format]


@pytest.mark.parametrize(("rank", "message"), named(BAD_RANKS))
@every_format
def test_bad_rank_of_any_format(format, rank, message):
    with refused(f"{FORMATS[format].__name__}: ", *message):
        make(format, rank=rank)


@pytest.mark.parametrize(("format", "rank", "message"), named(BAD_RANK_TUPLES))
def test_bad_rank_tuple(format, rank, message):
    with refused(f"{FORMATS[format].__name__}: ", *message):
        make(format, rank=rank)


# Other settings of a layer.

BAD_SETTINGS = [
    ("init", "zeros", ("init is one of pool, smooth, normal, got 'zeros'",)),
    ("init", None, ("init is one of pool, smooth, normal, got None",)),
    ("dtype", torch.int64, ("dtype must be a floating-point type, got torch.int64",)),
    ("dtype", torch.bool, ("dtype must be a floating-point type, got torch.bool",)),
    ("dtype", torch.complex64, ("dtype must be a floating-point type, got torch.complex64",)),
    ("dtype", "float32", ("dtype must be a floating-point type, got float32",)),
    ("dropout", 0.0, ("theta is the KEEP probability", "got 0.0")),
    ("dropout", "0.8", ("theta is the KEEP probability", "got '0.8'")),
]


@every_format
def test_good_settings(format):
    layer = make(format, init="normal", dtype=torch.float64, dropout=0.8)
    assert layer(torch.zeros(2, 8, 4, 4, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(("name", "value", "message"), named(BAD_SETTINGS))
@every_format
def test_bad_settings(format, name, value, message):
    with refused(*message):
        make(format, **{name: value})


# Settings of the dropout.

THETA = "theta is the KEEP probability, a number in (0, 1]"
MODES = "modes is 'all', 'outer', 'auto' or distinct mode numbers"
BAD_DROPOUTS = [
    ("theta", 0, (THETA, "got 0;", "theta=1 means no dropout")),
    ("theta", 0.0, (THETA, "got 0.0")),
    ("theta", -0.1, (THETA, "got -0.1")),
    ("theta", 1.1, (THETA, "got 1.1")),
    ("theta", math.nan, (THETA, "got nan")),
    ("theta", math.inf, (THETA, "got inf")),
    ("theta", "0.5", (THETA, "got '0.5'")),
    ("theta", True, (THETA, "got True")),
    ("theta", None, (THETA, "got None")),
    ("theta", torch.tensor(1.1), (THETA, "got 1.1")),
    ("theta", torch.tensor([0.5, 0.5]), (THETA, "got tensor([0.5")),
    ("law", "binomial", ("unknown law 'binomial'", "bernoulli, nested, replacement, gaussian", "td.register_law")),
    ("law", None, ("law None lacks draw, mean, second_moment, support",)),
    ("scaling", "none", ("scaling is one of inverted, paper, got 'none'",)),
    ("scaling", None, ("scaling is one of inverted, paper, got None",)),
    ("at_test", "exact", ("at_test is one of mean, sample, got 'exact'",)),
    ("modes", "channels", (MODES, "got 'channels'")),
    ("modes", (), (MODES, "got ()")),
    ("modes", (0, 0), (MODES, "got (0, 0)")),
    ("modes", (0, 1.0), (MODES, "got (0, 1.0)")),
    ("modes", (0, True), (MODES, "got (0, True)")),
    ("modes", 0, (MODES, "got 0")),
    ("modes", None, (MODES, "got None")),
    ("min_rank", -1, ("min_rank is an integer of at least 0, got -1",)),
    ("min_rank", 1.0, ("min_rank is an integer of at least 0, got 1.0",)),
    ("min_rank", True, ("min_rank is an integer of at least 0, got True",)),
    ("min_rank", None, ("min_rank is an integer of at least 0, got None",)),
]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"theta": 1},
        {"theta": 1e-3},
        {"theta": torch.tensor(0.5)},
        {"law": "nested", "min_rank": 2},
        {"min_rank": 2},
        {"scaling": "paper", "at_test": "sample", "modes": [0, 3]},
        {"modes": range(2)},
    ],
    ids=str,
)
def test_good_dropouts(changes):
    layer = make("tucker", dropout=drop(**changes))
    assert layer(torch.ones(2, 8, 4, 4)).isfinite().all()


@pytest.mark.parametrize(("name", "value", "message"), named(BAD_DROPOUTS))
def test_bad_dropouts(name, value, message):
    with refused("TensorDropout: ", *message):
        drop(**{name: value})


@pytest.mark.parametrize(("value", "message"), named([row[1:] for row in BAD_DROPOUTS if row[0] == "theta"]))
def test_bad_values_of_theta_are_refused_later_too(value, message):
    dropout = drop()
    with refused("TensorDropout: ", *message):
        dropout.theta = value
    assert float(dropout.theta) == pytest.approx(0.8)


def test_a_theta_that_float32_rounds_to_zero_is_refused():
    assert drop(theta=1e-30).theta > 0
    with refused(THETA):
        drop(theta=1e-50)


class CustomLaw:
    def draw(self, shape, theta, *, device):
        return torch.ones(shape, device=device)

    def mean(self, R, theta):
        return torch.ones(R)

    def second_moment(self, R, theta):
        return None

    def support(self, R, theta):
        return None


@pytest.mark.parametrize("law", ["replacement", "gaussian", CustomLaw()], ids=["replacement", "gaussian", "custom"])
def test_min_rank_goes_only_with_laws_that_have_one(law):
    drop(law=law, min_rank=0)
    name = law if isinstance(law, str) else "CustomLaw"
    with refused("min_rank=2 goes with the laws bernoulli and nested, not with", repr(name), "leave min_rank at 0"):
        drop(law=law, min_rank=2)


# The dropout in its layer.

BAD_PAIRS = [
    ("cp", {"modes": (0,)}, ("a CP layer has one mask for all modes", "modes=(0,)", "use modes='all'")),
    ("tucker", {"modes": (0, 4)}, ("modes=(0, 4) names [4]", "the layer has [0, 1, 2, 3]")),
    ("tucker", {"modes": (-1,)}, ("modes=(-1,) names [-1]", "the layer has [0, 1, 2, 3]")),
    ("tt", {"modes": (0, 1)}, ("modes=(0, 1) names [0]", "the layer has [1, 2, 3]")),
    ("tt", {"modes": (4,)}, ("modes=(4,) names [4]", "the layer has [1, 2, 3]")),
    ("ring", {"modes": (4,)}, ("modes=(4,) names [4]", "the layer has [0, 1, 2, 3]")),
    ("tucker", {"min_rank": 3}, ("min_rank=3 exceeds the rank 2 of a dropped mode", "(4, 2, 2, 5)", "lower min_rank")),
    ("tucker", {"min_rank": 3, "modes": (0, 1)}, ("min_rank=3 exceeds the rank 2",)),
    ("cp", {"min_rank": 7}, ("min_rank=7 exceeds the rank 6",)),
    ("tt", {"law": "nested", "min_rank": 5}, ("min_rank=5 exceeds the rank 4",)),
]
GOOD_PAIRS = [
    ("cp", {"modes": "all"}),
    ("tucker", {"modes": (0, 3)}),
    ("tt", {"modes": (1, 3)}),
    ("tucker", {"min_rank": 2}),
    ("tucker", {"min_rank": 3, "modes": (0, 3)}),
    ("cp", {"min_rank": 6}),
    ("tt", {"law": "nested", "min_rank": 4}),
    ("ring", {"modes": (0, 3), "min_rank": 2}),
]


@pytest.mark.parametrize(("format", "dropout"), GOOD_PAIRS)
def test_good_dropout_in_its_layer(format, dropout):
    assert make(format, dropout=drop(**dropout)).dropped_axes


@pytest.mark.parametrize(("format", "dropout", "message"), named(BAD_PAIRS))
def test_bad_dropout_in_its_layer(format, dropout, message):
    with refused("TensorDropout: ", *message):
        make(format, dropout=drop(**dropout))


# The input. Parameters: float32 on the CPU.

SIZES = "expected an input of shape (B, 8, 4, 4), got"
GOOD_INPUT = torch.zeros(2, 8, 4, 4)
BAD_INPUTS = [
    ("unbatched", torch.zeros(8, 4, 4), ("expected 4 axes (B, 8, 4, 4), got 3: (8, 4, 4)",)),
    ("too many modes", torch.zeros(2, 8, 4, 4, 1), ("expected 4 axes (B, 8, 4, 4), got 5",)),
    ("flattened", torch.zeros(2, 128), ("expected 4 axes (B, 8, 4, 4), got 2",)),
    ("a number", torch.zeros(()), ("expected 4 axes (B, 8, 4, 4), got 0",)),
    ("fewer channels", torch.zeros(2, 7, 4, 4), (SIZES, "(2, 7, 4, 4)", "feature map must have")),
    ("larger image", torch.zeros(2, 8, 5, 4), (SIZES, "(2, 8, 5, 4)")),
    ("channels last", torch.zeros(2, 4, 4, 8), (SIZES, "(2, 4, 4, 8)")),
    ("one channel would broadcast", torch.zeros(2, 1, 4, 4), (SIZES, "(2, 1, 4, 4)")),
    ("one pixel would broadcast", torch.zeros(2, 8, 1, 1), (SIZES, "(2, 8, 1, 1)")),
    ("empty batch", torch.zeros(0, 8, 4, 4), ("the batch is empty: (0, 8, 4, 4)",)),
    ("integers", torch.zeros(2, 8, 4, 4, dtype=torch.int64), ("floating-point input, got torch.int64", "x.float()")),
    ("bytes", torch.zeros(2, 8, 4, 4, dtype=torch.uint8), ("floating-point input, got torch.uint8",)),
    ("booleans", torch.zeros(2, 8, 4, 4, dtype=torch.bool), ("floating-point input, got torch.bool",)),
    ("complex", torch.zeros(2, 8, 4, 4, dtype=torch.complex64), ("floating-point input, got torch.complex64",)),
    ("other device", torch.zeros(2, 8, 4, 4, device="meta"), ("input is on meta, the parameters on cpu; move",)),
    ("double", GOOD_INPUT.double(), ("input is torch.float64, the parameters are torch.float32", "autocast")),
    ("half", GOOD_INPUT.half(), ("input is torch.float16, the parameters are torch.float32", "autocast")),
    ("numpy", GOOD_INPUT.numpy(), ("expected a tensor of shape (B, 8, 4, 4), got ndarray",)),
    ("list", GOOD_INPUT.tolist(), ("expected a tensor of shape (B, 8, 4, 4), got list",)),
    ("nothing", None, ("expected a tensor of shape (B, 8, 4, 4), got NoneType",)),
]


@every_format
@pytest.mark.parametrize("training", [True, False])
def test_good_input(format, training):
    assert make(format, dropout=0.8).train(training)(GOOD_INPUT).shape == (2, 10)


@pytest.mark.parametrize(("x", "message"), [pytest.param(x, message, id=name) for name, x, message in BAD_INPUTS])
@every_format
def test_bad_input(format, x, message):
    with refused(f"{FORMATS[format].__name__}: ", *message):
        make(format, dropout=0.8)(x)


def test_a_mixed_dtype_on_the_meta_device_is_refused_like_anywhere():
    layer = make("cp", device="meta")
    assert layer(GOOD_INPUT.to("meta")).shape == (2, 10)
    with refused("input is torch.float64, the parameters are torch.float32"):
        layer(GOOD_INPUT.double().to("meta"))


# Laws.


def test_good_law_has_a_name_of_its_own(monkeypatch):
    monkeypatch.setattr("tensor_dropout.layers.laws._REGISTERED", {})
    law = CustomLaw()
    td.register_law("mine", law)
    td.register_law("mine", law)  # again, as when a notebook cell is run twice
    assert drop(law="mine").law is law


@pytest.mark.parametrize(
    ("name", "law", "message"),
    [
        pytest.param("bernoulli", CustomLaw(), ("register_law: the name 'bernoulli' is taken",), id="built-in"),
        pytest.param("mine", Bernoulli(2), ("the name 'mine' is taken by another law; choose another",), id="taken"),
        pytest.param("", CustomLaw(), ("register_law: a name is a text that is not empty, got ''",), id="empty name"),
        pytest.param(3, CustomLaw(), ("register_law: a name is a text that is not empty, got 3",), id="number"),
        pytest.param("other", CustomLaw, ("is a class; pass an instance of it",), id="class"),
        pytest.param("other", object(), ("lacks draw, mean, second_moment, support (see td.Law)",), id="object"),
        pytest.param("other", lambda: None, ("lacks draw",), id="function"),
    ],
)
def test_bad_laws_to_register(monkeypatch, name, law, message):
    monkeypatch.setattr("tensor_dropout.layers.laws._REGISTERED", {"mine": CustomLaw()})
    with refused(*message):
        td.register_law(name, law)
    with refused("unknown law 'other'"):
        drop(law="other")


def test_a_class_is_no_law():
    drop(law=CustomLaw())
    with refused("is a class; pass an instance of it"):
        drop(law=CustomLaw)
