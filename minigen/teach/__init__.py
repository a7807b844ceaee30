"""What a notebook needs beside the engine: `from minigen.teach import check, measured, show`."""

from minigen.teach.checking import check
from minigen.teach.claims import Claim, verdicts
from minigen.teach.looking import load_model
from minigen.teach.measuring import mark, measured
from minigen.teach.showing import show
from minigen.teach.using import using

__all__ = ["Claim", "check", "load_model", "mark", "measured", "show", "using", "verdicts"]
