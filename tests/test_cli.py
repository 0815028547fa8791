"""The command line: exit status and messages."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import tensor_dropout as td
from tensor_dropout_lab import cli, experiments
from tensor_dropout_lab.data import DATASETS

runner = CliRunner()


@pytest.fixture
def experiment(monkeypatch, tmp_path):
    """An experiment "fake" whose run can be replaced; the current folder is empty."""
    calls = []

    def run(name, preset, out, seed, **options):
        calls.append((name, preset, out, seed, options))
        return [out / name / "numbers.json"]

    fake = SimpleNamespace(run=run, calls=calls)
    monkeypatch.setitem(sys.modules, "fake_experiment", fake)
    entry = experiments.Entry("fake_experiment", "does nothing")
    monkeypatch.setitem(experiments.EXPERIMENTS, "fake", entry)
    monkeypatch.chdir(tmp_path)
    return fake


def fail_with(error):
    def run(name, preset, out, seed, **options):
        raise error

    return run


def test_version():
    result = runner.invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"tensor-dropout {td.__version__}"


def test_no_command_shows_the_help():
    assert "reproduce" in runner.invoke(cli.app, []).output


def test_help_lists_the_experiments(experiment):
    result = runner.invoke(cli.app, ["reproduce", "--help"])
    assert result.exit_code == 0
    for text in (
        "digits",
        "fake",
        "does nothing",
        "quick, paper",
        "Example: tensor-dropout reproduce digits",
        "--seed",
    ):
        assert text in result.output


OPTIONS = {"roots": {}, "device": "auto", "workers": 1, "rerun_stale": False}
"""What every experiment is told besides its name, preset, folder and seed."""


def test_reproduce_says_what_it_wrote(experiment):
    result = runner.invoke(cli.app, ["reproduce", "fake"])
    assert result.exit_code == 0
    base = Path("out", "reproduce", "quick")
    assert str(base / "fake" / "numbers.json") in result.output
    assert experiment.calls == [("fake", "quick", base, 0, OPTIONS)]


def test_reproduce_passes_its_options_on(experiment):
    arguments = [
        "--preset",
        "paper",
        "--out",
        "here",
        "--seed",
        "7",
        "--device",
        "cpu",
        "--workers",
        "3",
        "--rerun-stale",
        "--slurm",
        "gpu",
    ]
    roots = ["--root", "/all", "--root", "cifar100=/cifar"]
    result = runner.invoke(cli.app, ["reproduce", "fake", *arguments, *roots])
    assert result.exit_code == 0
    [(name, preset, out, seed, options)] = experiment.calls
    assert (name, preset, out, seed) == ("fake", "paper", Path("here"), 7)
    assert options["roots"] == dict.fromkeys((name for name in DATASETS if DATASETS[name].has_files), "/all") | {
        "cifar100": "/cifar"
    }
    expected = {"device": "cpu", "workers": 3, "rerun_stale": True, "cluster": "slurm", "slurm_partition": "gpu"}
    assert options == expected | {"roots": options["roots"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce"], "NAME"),
        (["reproduce", "digts"], "digits"),
        (["reproduce", "zzz"], "known are"),
        (["reproduce", "fake", "--preset", "huge"], "quick, paper"),
        (["reproduce", "fake/row"], "fake is run as a whole"),
        (["reproduce", "fake", "--seed", "-1"], "seed"),
        (["reproduce", "fake", "--seed", "x"], "seed"),
        (["reproduce", "fake", "--out", "a-file"], "a-file"),
        (["reproduce", "fake", "--workers", "0"], "workers"),
        (["reproduce", "all", "--preset", "huge"], "quick, paper"),
        (["fly"], "fly"),
    ],
)
def test_bad_usage(experiment, tmp_path, arguments, message):
    (tmp_path / "a-file").write_text("")
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert message.lower() in result.output.lower()
    assert not experiment.calls


@pytest.mark.parametrize(
    "error", [td.TensorDropoutError("digits: install scikit-learn"), PermissionError(13, "Permission denied", "out")]
)
def test_a_failure_is_one_sentence(experiment, error):
    experiment.run = fail_with(error)
    result = runner.invoke(cli.app, ["reproduce", "fake"])
    assert result.exit_code == 1
    assert str(error) in result.output
    assert result.output.count("\n") == 1


def test_our_own_mistakes_keep_their_traceback(experiment):
    experiment.run = fail_with(RuntimeError("a bug"))
    result = runner.invoke(cli.app, ["reproduce", "fake"])
    assert result.exit_code == 1
    assert isinstance(result.exception, RuntimeError)


def test_interruption(experiment):
    experiment.run = fail_with(KeyboardInterrupt())
    result = runner.invoke(cli.app, ["reproduce", "fake"])
    assert result.exit_code == 130
    assert "interrupted" in result.output
    assert result.output.count("\n") == 1


def test_an_unknown_experiment_from_python():
    with pytest.raises(td.TensorDropoutError, match="no experiment 'nothing'"):
        experiments.load_experiment("nothing")


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra(missing, tmp_path):
    (tmp_path / "out").mkdir()
    program = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv[1:] = ['ls']\n"
        "from tensor_dropout_lab.__main__ import main\n"
        "main()"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "pip install 'tensor-dropout[lab]'" in result.stderr
    assert missing in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_real_process(tmp_path, number):
    """The signal itself, in the middle of training."""
    command = [sys.executable, "-m", "tensor_dropout_lab", "reproduce", "digits", "--out", str(tmp_path / "out")]
    # A suite that runs in the background of a shell ignores SIGINT, and its children would too.
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, preexec_fn=listen, **pipes)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("out/digits/*/result.json")) and time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "reproduce digits: interrupted; what is done is kept in" in errors
    assert "Traceback" not in errors
    assert list(tmp_path.glob("out/digits/*/result.json"))


WITHOUT_TORCH = """
import io, sys, contextlib
sys.modules["torch"] = None  # importing it would fail
sys.argv[1:] = {arguments}
from tensor_dropout_lab.__main__ import main
shown = io.StringIO()
with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
    main()
print(shown.getvalue())
"""
COMMANDS = sorted(command.name or command.callback.__name__ for command in cli.app.registered_commands)


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join
)
def test_help_does_not_need_torch(arguments):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH.format(arguments=arguments)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ("Usage: tensor-dropout" in done.stdout) != (arguments == ["--version"])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_summary_and_an_example(name):
    shown = runner.invoke(cli.app, [name, "--help"], env={"COLUMNS": "200"}).output
    assert f"tensor-dropout {name} " in shown.replace("Usage: tensor-dropout", "", 1)
