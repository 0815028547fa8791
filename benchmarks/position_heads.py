"""Which head finds positions best on frozen maps, from few labels: results/position-plan.md, group by group.

    python benchmarks/position_heads.py --device cuda --jobs 6        the plan, on a GPU
    python benchmarks/position_heads.py --sets retina --n 100         some of it
    python benchmarks/position_heads.py --surface --device cuda       error over rank, θ and α
    python benchmarks/position_heads.py --quick                       a minute on a CPU, into out/bench
    python benchmarks/position_heads.py --report                      tables and pictures, from the record

The code is in the folder ``position_heads`` beside this file; the maps are those of benchmarks/estimators/features.py.
"""

if __name__ == "__main__":
    from position_heads.command import main  # the folder: a package comes before a module of the same name

    raise SystemExit(main())
