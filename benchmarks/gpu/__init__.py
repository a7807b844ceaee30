"""Measurements on a GPU: `python -m benchmarks.gpu`, on any machine with torch and Triton."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "stand_ins"))
