"""The entry point of `minigen` and `python -m minigen`, tuned for a fast start and a fast end."""

import gc

# New objects that trigger a garbage collection. Imports create many, which all stay in use.
GC_THRESHOLD = 100_000


def run() -> None:
    """Run the command line as the whole process."""
    gc.set_threshold(GC_THRESHOLD)
    from minigen.cli.main import main  # noqa: PLC0415 - imports create most of the objects

    try:
        main()
    finally:
        gc.freeze()  # skip the collection at exit, which would take a second


if __name__ == "__main__":
    run()
