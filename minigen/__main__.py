"""`python -m minigen` is `minigen`: a process that is to start, and to end, without waiting."""

import gc

from minigen.cli.main import main

GARBAGE = 100_000  # objects more than before, and Python looks for garbage: imports make as many


def run() -> None:
    """Run the command line in a process of its own."""
    gc.set_threshold(GARBAGE)
    try:
        main()
    finally:
        gc.freeze()  # the process ends: that nobody looks for garbage first saves a second


if __name__ == "__main__":
    run()
