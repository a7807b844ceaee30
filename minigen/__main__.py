"""`python -m minigen` is `minigen`."""

from minigen.cli import main

main()
