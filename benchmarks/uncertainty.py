"""Our intervals beside Laplace, VBLL, Monte-Carlo dropout, ensembles and quantile regression.

The code is in the folder ``uncertainty`` beside this file; benchmarks/README.md says how to run it.
"""

if __name__ == "__main__":
    import resource
    import sys
    from pathlib import Path

    sys.path.append(str(Path(__file__).parent / "estimators"))
    from uncertainty.command import main  # the folder: a package comes before a module of the same name

    resource.setrlimit(resource.RLIMIT_DATA, (8 * 2**30, resource.getrlimit(resource.RLIMIT_DATA)[1]))  # not all memory
    raise SystemExit(main())
