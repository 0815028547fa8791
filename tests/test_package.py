"""The package as a whole: what importing it does, and what it offers."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import tensor_dropout as td

OPTIONAL = ("matplotlib", "nibabel", "onnx", "pandas", "PIL", "pydantic", "rich", "scipy", "sklearn", "submitit")
OPTIONAL += ("tensorboard", "tensorly", "tltorch", "tomli_w", "typer")
STATE = """
import torch
def state():
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "grad": torch.is_grad_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark),
        "einsum": (torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy),
        "seed": torch.initial_seed(),
        "random": torch.get_rng_state().tolist(),
        "print": repr(torch.tensor([1 / 3, 1e-9])),
    }
"""


def run(code):
    """Run code in a fresh interpreter; return what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_pulls_in_none_of_the_extras():
    loaded = run(f"import sys, tensor_dropout; print([name for name in {OPTIONAL} if name in sys.modules])")
    assert loaded == "[]"


def test_import_and_use_change_no_global_state():
    run(
        STATE
        + """
torch.manual_seed(7)
before = state()
import tensor_dropout as td
assert state() == before, (before, state())
del before["random"]
layer = td.TuckerRegression((4, 3), 2, 2, dropout=0.5)
layer(torch.zeros(2, 4, 3)).sum().backward()
after = state()
del after["random"]
assert after == before, (before, after)
"""
    )


def test_import_says_nothing():
    code = "import warnings; warnings.simplefilter('error', UserWarning); import tensor_dropout"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", td.__all__)
def test_every_public_name_exists_and_is_documented(name):
    thing = getattr(td, name)
    if name == "__version__":
        assert thing == importlib.metadata.version("tensor-dropout")
    else:
        assert thing.__doc__
        assert len(thing.__doc__.strip()) > 20


def test_public_names_are_sorted_and_listed_once():
    assert len(set(td.__all__)) == len(td.__all__)
    assert td.__all__ == sorted(td.__all__)


@pytest.mark.parametrize("name", [name for name in td.__all__ if isinstance(getattr(td, name), type)])
def test_every_public_method_is_documented(name):
    for member, value in vars(getattr(td, name)).items():
        if not member.startswith("_") and (callable(value) or isinstance(value, property)):
            assert value.__doc__, f"{name}.{member}"


def list_imports(path: Path) -> set[str]:
    """The modules that a file imports, anywhere in it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return named | {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def test_the_library_never_imports_the_laboratory():
    files = list(Path(td.__file__).parent.rglob("*.py"))
    assert len(files) > 40
    guilty = [path.name for path in files if any("tensor_dropout_lab" in name for name in list_imports(path))]
    assert guilty == []
    assert any("tensor_dropout_lab" in name for name in list_imports(Path(__file__).with_name("test_cli.py")))


def test_using_every_public_name_loads_no_compiler():
    """``import torch`` itself is allowed what it loads; the names of the library add no compiler to it."""
    code = """
import sys, torch
heavy = {"triton", "sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor"}
assert not heavy & set(sys.modules), "torch loads these itself now"
import tensor_dropout as td
for name in td.__all__:
    getattr(td, name)
layer = td.TuckerRegression((4, 3), 2, 2, dropout=0.5)
layer(torch.zeros(2, 4, 3)).sum().backward()
layer.moments(torch.zeros(2, 4, 3))
print(sorted(heavy & set(sys.modules)))
"""
    assert run(code) == "[]"


@pytest.mark.parametrize("package", ["pydantic", "rich", "filelock"])
@pytest.mark.parametrize("module", ["config", "loop"])
def test_training_without_the_extra_is_one_sentence(package, module):
    code = f"""
import sys
from tensor_dropout import TensorDropoutError
for name in [name for name in sys.modules if name.partition(".")[0] == {package!r}]:
    del sys.modules[name]
sys.modules[{package!r}] = None
try:
    import tensor_dropout_lab.training.{module}
except TensorDropoutError as error:
    print(error)
"""
    assert run(code) == (f"training: {package} is not installed; install it with: pip install 'tensor-dropout[lab]'")
