"""How many clicks labelling takes (a simulated annotator), and the second stage: results/labelling-plan.md.

    python benchmarks/labelling.py --maps ../shared/data/position     maps of an early layer, once (five minutes)
    python benchmarks/labelling.py                                    what the record does not have: an hour on one core
    python benchmarks/labelling.py --sets wings --parts loop          some of it
    python benchmarks/labelling.py --report                           tables and the picture, from the record
    python benchmarks/labelling.py --quick                            one short run on simulated pictures, into --out

The code is in the folder ``labelling`` beside this file. The maps are those of benchmarks/estimators/features.py and
of --maps.
"""

if __name__ == "__main__":
    from labelling.command import main  # the folder: a package comes before a module of the same name

    raise SystemExit(main())
