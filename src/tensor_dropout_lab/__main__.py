"""The entry point of ``tensor-dropout`` and ``python -m tensor_dropout_lab``."""

import sys


def main() -> None:
    """Run the command line, or say which extra it needs."""
    try:
        from tensor_dropout_lab import cli
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("typer", "rich"):
            raise
        extra = "label" if "label" in sys.argv[1:2] else "lab"
        sys.exit(
            f"tensor-dropout: the command line needs {error.name}, which is not installed; install it with: "
            f"pip install 'tensor-dropout[{extra}]'"
        )
    except KeyboardInterrupt:
        print("tensor-dropout: interrupted before it began", file=sys.stderr)
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
