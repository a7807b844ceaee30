"""Test minigen in other places and on other machines: `python -m tools.portability`.

Each cell is one environment and one part: for example the tests in a clone with a space in its
path, or the notebooks with an old processor's instructions only. Standard library only.
"""
