"""The benchmark of the heads runs, refuses wrong heads and bad arguments, and counts right. Nothing here is timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from heads import checking, contenders, counting, growth, peak, tables, timing
from heads.cases import CASES, SUITE, mode_cases, rank_cases
from heads.command import main
from heads.drawing import spread

TINY = CASES["tiny"]
FAST = ["--cases", "tiny", "--modes", "eager", "--no-memory", "--repeats", "3", "--seconds", "0.01"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.meshgrid")  # called by TensorLy-Torch without its indexing


def named_contenders(case=TINY):
    return {contender.key: contender for contender in contenders.list_contenders(case)}


@pytest.fixture
def _no_figure(monkeypatch):
    monkeypatch.setattr("heads.command.draw", lambda record, stem: [])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder and the record of a whole run on tiny heads."""
    folder = tmp_path_factory.mktemp("bench")
    assert main([*FAST, "--out", str(folder)]) == 0
    return folder, json.loads((folder / "heads-cpu.json").read_text())


def test_a_run_records_every_contender_with_its_spread_and_counts(finished):
    _, record = finished
    assert record["finished"]
    assert record["environment"]["torch"] == torch.__version__
    assert record["ceilings"]["bytes_per_second"] > 0
    cells = [c for c in record["cells"] if (c["batch"], c["pass"]) == (8, "both")]
    assert [c["contender"] for c in cells] == list(named_contenders())
    for cell in cells:
        assert "failure" not in cell, cell
        assert cell["min"] <= cell["quartiles"][0] <= cell["median"] <= cell["quartiles"][1] <= cell["max"]
        assert cell["multiply_adds"] > 0
        assert cell["floor_bytes"]["x"] == 3 * 8 * 72 * 4
        assert cell["over_floor"] < cell["over_floor_x"]
        assert cell["saved_bytes"] >= 0
    assert all(check["error"] < 1e-4 and check["problem"] is None for check in record["checks"])


def test_a_run_fits_growth_with_rank_and_modes(finished):
    _, record = finished
    found = {(s["over"], s["contender"]) for s in record["growth"]}
    assert found == {("rank", "tucker"), ("rank", "cp"), ("modes", "tucker"), ("modes", "cp"), ("modes", "tt")}


def test_tables_and_figure_are_redrawn_from_the_record_alone(finished, tmp_path, capsys):
    folder, _ = finished
    copied = tmp_path / "heads-cpu.json"
    copied.write_text((folder / "heads-cpu.json").read_text())
    assert main(["--redraw", str(copied)]) == 0
    for ending in ("md", "png", "svg"):
        path = copied.with_suffix(f".{ending}")
        assert path.stat().st_size > 1000
        assert str(path) in capsys.readouterr().out or ending != "md"
    text = copied.with_suffix(".md").read_text()
    assert text == (folder / "heads-cpu.md").read_text()
    for column in ("× pooled", "× flat", "TensorLy ÷ ours", "× floor", "peak, MiB"):
        assert f"| {column} " in text
    row = next(line for line in text.splitlines() if line.startswith("| **Tucker** | 8 |"))
    assert row.count("×") == 4  # to pooled and flat linear, TensorLy-Torch and the einsum


@pytest.mark.usefixtures("_no_figure")
def test_a_wrong_head_is_refused_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    class Wrong(contenders.LAYERS["cp"]):
        def forward(self, x):
            return 1.001 * super().forward(x)

    monkeypatch.setitem(contenders.LAYERS, "cp", Wrong)
    arguments = [*FAST, "--contenders", "tucker,cp,flat", "--batches", "2", "--growth", "none", "--out", str(tmp_path)]
    assert main(arguments) == 1
    assert "refused to time tiny cp" in capsys.readouterr().err
    cells = json.loads((tmp_path / "heads-cpu.json").read_text())["cells"]
    assert {c["contender"]: "median" in c for c in cells} == {"tucker": True, "cp": False, "flat": True}
    assert "refused" in (tmp_path / "heads-cpu.md").read_text()


@pytest.mark.usefixtures("_no_figure")
def test_a_missing_library_is_a_line_and_not_a_crash(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tltorch", None)
    arguments = [*FAST, "--contenders", "flat,tensorly-cp", "--batches", "2", "--growth", "none"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert "| CP of TensorLy-Torch | 2 | not installed |" in (tmp_path / "heads-cpu.md").read_text()


def test_an_interrupted_run_writes_what_it_has(tmp_path, monkeypatch):
    taken = []

    def interrupt(*arguments):
        taken.append(1)
        if len(taken) > 1:
            raise KeyboardInterrupt
        return timing.sample_in_turn(*arguments)

    monkeypatch.setattr("heads.running.sample_in_turn", interrupt)
    assert main([*FAST, "--contenders", "flat", "--out", str(tmp_path)]) == 130
    record = json.loads((tmp_path / "heads-cpu.json").read_text())
    assert (len(record["cells"]), record["finished"]) == (1, False)
    assert "did not end" in (tmp_path / "heads-cpu.md").read_text()
    assert (tmp_path / "heads-cpu.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "cifra"], "cifra"),
        (["--batches", "0"], "positive whole numbers"),
        (["--batches", "eight"], "positive whole numbers"),
        (["--seconds", "-1"], "positive number"),
        (["--modes", "graph"], "needs --device cuda"),
        (["--contenders", "fastest"], "fastest"),
        (["--dtype", ""], "choose from"),
        (["--redraw", "nowhere.json"], "no record"),
        (["--redraw", __file__], "no record"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_one_sentence(capsys):
    with pytest.raises(SystemExit):
        main(["--device", "cuda"])
    assert capsys.readouterr().err == "heads.py: --device cuda needs a GPU, and torch sees none here\n"


def test_slopes():
    sizes = [8, 16, 64, 512]
    assert growth.fit_slope(sizes, [3 * size**2 for size in sizes]) == pytest.approx((2, 1))
    assert growth.fit_slope(sizes, [7, 7, 7, 7]) == pytest.approx((0, 1))
    slope, r_squared = growth.fit_slope(sizes, [1, 3, 2, 9])
    assert 0 < slope < 1
    assert 0 < r_squared < 1


@pytest.mark.parametrize("format", contenders.FORMATS)
def test_all_contenders_of_a_format_compute_the_same(format):
    case = TINY
    ours, by_hand = contenders.make_ours(format, case), contenders.Einsum(format, case)
    order = [*range(len(ours.operands()))]
    if format == "tucker":
        order[-2:] = order[:-3:-1]
    with torch.no_grad():
        for parameter, k in zip(by_hand.operands, order, strict=True):
            parameter.copy_(ours.operands()[k])
        by_hand.bias.copy_(ours.bias)
    x = torch.randn(3, *case.input_shape)
    assert_close(by_hand(x), ours(x))
    assert_close(checking.masked_weight(ours.double(), format, [None] * len(ours._ranks)), ours.dense_weight())


@pytest.mark.parametrize("key", ["tucker", "rtrl-tucker", "cp", "rtrl-cp", "tt", "rtrl-tt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_heads_pass_their_check(key, dtype):
    contender = named_contenders()[key]
    layer = contender.make(TINY).to(dtype)
    x, upstream = torch.randn(4, *TINY.input_shape, dtype=dtype, requires_grad=True), torch.randn(4, 5, dtype=dtype)
    assert checking.measure_error(layer, contender.format, x, upstream) < checking.TOLERANCES[dtype]


def test_counts_of_flatten_and_linear():
    module = named_contenders()["flat"].make(TINY)
    x = torch.randn(4, *TINY.input_shape, requires_grad=True)
    assert counting.count_operations(module, x, "forward") == 2 * 4 * 72 * 5
    assert counting.count_operations(module, x, "both") == 3 * 2 * 4 * 72 * 5
    assert counting.bytes_floor(module, x, "forward") == (4 * 72 * 4, (72 * 5 + 5) * 4)
    assert counting.bytes_floor(module, x, "both") == (3 * 4 * 72 * 4, 2 * (72 * 5 + 5) * 4)
    assert counting.saved_bytes(module, x) == 0  # x and the weight alone


def test_peak_memory_of_a_pass_has_x_the_parameters_and_their_gradients():
    request = {"case": "cifar", "batch": 64, "dtype": "float32", "layout": "first"}
    peaks = peak.peaks_on_cpu(["pooled", "flat"], request)
    x, weight = 64 * 8192 * 4, 8192 * 100 * 4
    assert 2 * (x + weight) * 0.9 < peaks["flat"] < 2 * (x + weight) * 1.5
    assert peaks["pooled"] < peaks["flat"]


def test_ratios_and_medians():
    assert timing.summarize([1.0, 2.0, 3.0, 4.0, 10.0]) == {
        "median": 3.0,
        "min": 1.0,
        "max": 10.0,
        "quartiles": [2.0, 4.0],
        "iqr": 2.0,
        "samples": 5,
    }
    assert tables.ratio({"median": 3.0}, {"median": 2.0}) == 1.5
    assert tables.ratio({"median": 3.0}, {"failure": "not installed"}) is None


def test_samples_are_taken_in_turn_and_a_failure_stops_only_its_own():
    order = []

    def sample(key):
        order.append(key)
        if key == "b":
            raise RuntimeError("lost")
        return 1.0

    times, errors = timing.sample_in_turn({key: lambda key=key: sample(key) for key in "abc"}, 5, 0.0)
    assert "".join(order) == "abc" + "ac" * (timing.MIN_ROUNDS - 1)
    assert times["c"] == [1.0] * timing.MIN_ROUNDS
    assert str(errors["b"]) == "lost"


def test_labels_move_apart_and_stay_inside():
    places = spread([0.9, 0.91, 0.92, 0.1], 0.1)
    assert places == pytest.approx([0.8, 0.9, 1.0, 0.1])


def test_cases_are_those_of_the_documentation():
    assert [CASES[key].shape for key in SUITE] == ["512×4×4→100", "2048×7×7→1000", "512×6×7×6→1", "512×4×7×7→400"]
    assert list(rank_cases()) == [32, 64, 128, 256, 512]
    assert all(torch.Size(case.input_shape).numel() == 4096 for case in mode_cases().values())
