"""Whether minigen works in other places and on other machines: `python -m tools.portability`.

Each cell is one environment and one part: the tests of a clone with a space in its path, or one
notebook on a processor that pretends to be old. Standard library only.
"""
