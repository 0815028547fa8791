"""Every test starts from the same seed, on one thread; the layers themselves are in ``layers_under_test.py``."""

import gc
import os
import signal

# Some virtual machines announce Intel's AMX and then crash on it: the first larger bf16 product ends the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports Triton: test_kernels.py runs the kernels in its interpreter
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell; children would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    """Look for garbage less often: a full search takes a second after ten thousand tests are collected."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def pytest_unconfigure():
    """Give everything back to the collector, or libraries complain of leaks at exit."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
