"""What names stand for in modules and classes, and which of them an answer has changed.

Thousands of names are compared after each check, so a module that is as before is compared by the
identity of its objects alone, without a step of Python per name. The objects are kept meanwhile:
none can be replaced by a new one at the same address.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from operator import is_
from types import ModuleType
from typing import Any, NamedTuple

from minigen_course.grading.stub import OWN


class Namespace(NamedTuple):
    """What the names of a module or of a class stood for, before an answer ran."""

    place: str
    owner: ModuleType | type
    names: list[str]
    values: list[Any]

    @property
    def now(self) -> Mapping[str, Any]:
        if isinstance(self.owner, type) or sys.modules.get(self.place) is self.owner:
            return vars(self.owner)
        return {}

    def is_as_before(self) -> bool:
        now = self.now
        return (
            len(now) == len(self.names)
            and all(map(is_, now.values(), self.values))
            and all(map(is_, now, self.names))
        )

    def changed(self) -> str:
        """Return a name whose function or class is another now, or that the class did not have."""
        now = self.now
        for name, value in zip(self.names, self.values, strict=True):
            if callable(value) and now.get(name) is not value:
                return name
        if isinstance(self.owner, type):
            known = set(self.names)
            return next((each for each in now if each not in known and callable(now[each])), "")
        return ""


def namespaces_now(others: Collection[str]) -> list[Namespace]:
    """Return what the names of minigen's modules, of `others` and of their classes stand for."""
    found = []
    for place, module in list(sys.modules.items()):
        if place.partition(".")[0] not in OWN and place not in others:
            continue
        names = list(vars(module))
        values = list(vars(module).values())
        found.append(Namespace(place, module, names, values))
        for name, each in zip(names, values, strict=True):
            if isinstance(each, type) and each.__module__ == place:
                own = vars(each)
                found.append(Namespace(f"{place}.{name}", each, list(own), list(own.values())))
    return found


def first_change(before: Sequence[Namespace]) -> str:
    """Return a name that no longer stands for the same, or that a class did not have before."""
    for each in before:
        if not each.is_as_before():  # it may be a value that minigen itself changes
            name = each.changed()
            if name:
                return f"{each.place}.{name}"
    return ""
