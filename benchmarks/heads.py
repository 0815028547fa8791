"""Time and memory of the heads of a network, ours and others', in one interleaved run: see ``--help``.

    python benchmarks/heads.py                                                     the CPU suite: minutes on two cores
    python benchmarks/heads.py --quick                                             half a minute
    python benchmarks/heads.py --device cuda --modes graph --dtype float32,bfloat16
    python benchmarks/heads.py --redraw out/bench/heads-cpu.json                   tables and figure from the record

The code is in the folder ``heads`` beside this file. The training step of whole networks: ``benchmarks/training.py``.
"""

import os

# Some virtual machines announce Intel's AMX and then crash on it; set the variable yourself to measure AMX.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

if __name__ == "__main__":
    from heads.command import main  # the folder: a package comes before a module of the same name

    raise SystemExit(main())
