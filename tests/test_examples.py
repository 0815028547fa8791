"""The examples run as they stand."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_from_conversion_to_onnxruntime(tmp_path, capsys):
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    example = runpy.run_path(str(EXAMPLES / "convert_finetune_export.py"))
    assert example["main"](tmp_path) < 1e-4
    assert (tmp_path / "network.onnx").is_file()
    assert "fine-tuned" in capsys.readouterr().out
