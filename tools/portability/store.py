"""Results of cells, stored by commit, so that an interrupted run can continue."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

GREEN, RED, NOT_TRIED = "green", "RED", "not tried"


@dataclass(frozen=True)
class Cell:
    """One part of what minigen has to do, in one environment."""

    environment: str
    part: str

    @property
    def name(self) -> str:
        """The name of the cell on the command line."""
        return f"{self.environment}/{self.part}"


@dataclass(frozen=True)
class Result:
    """The result of a cell. `detail` is a count if the cell is green, and the reason otherwise."""

    verdict: str
    detail: str = ""
    seconds: float = 0.0
    failed: tuple[str, ...] = ()
    machine: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.verdict == GREEN:
            return f"{GREEN} ({self.detail})" if self.detail else GREEN
        return f"{self.verdict}: {self.detail}"


class Store:
    """The results of one commit: one file per cell, each written atomically."""

    def __init__(self, folder: Path, commit: str):
        self._root, self._commit = folder, commit
        self._folder = folder / commit

    def get(self, cell: Cell) -> Result | None:
        """Return the result of a cell at this commit, or None."""
        path = self._path(cell)
        if not path.exists():
            return None
        values = json.loads(path.read_text(encoding="utf-8"))
        return Result(**values | {"failed": tuple(values["failed"])})

    def put(self, cell: Cell, result: Result) -> None:
        """Store a result."""
        path = self._path(cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
        os.replace(unfinished, path)

    def forget(self, cells: Iterable[Cell]) -> None:
        """Drop the results of these cells at this commit."""
        for cell in cells:
            self._path(cell).unlink(missing_ok=True)

    def log(self, cell: Cell) -> Path:
        """Return the file for everything that a cell prints."""
        path = self._folder / "logs" / f"{cell.environment}.{cell.part}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def others(self) -> list[str]:
        """Return the other commits that have results here."""
        if not self._root.exists():
            return []
        folders = (path.parent.name for path in self._root.glob("*/*.json"))
        return sorted({name for name in folders if name != self._commit})

    def _path(self, cell: Cell) -> Path:
        return self._folder / f"{cell.environment}.{cell.part}.json"
