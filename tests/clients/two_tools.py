"""Two tools with small argument types, and the order in which a loop forces their calls.

The default model is small, so its choice of tools and its words prove nothing. The loop does: the
first turn must call either tool ("required"), the second the other one by name, and the last none.
Each call checks its arguments, as a client does by the tool's schema.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, Field

QUESTION = "How warm is it in Oslo, and how much is that in Fahrenheit? Use the tools."
DEGREES = {"Oslo": 4, "Lima": 19, "Pune": 27}
City = Literal["Oslo", "Lima", "Pune"]
Celsius = Annotated[int, Field(ge=-60, le=60)]


class GetTemperature(BaseModel):
    """The temperature in a city, in degrees Celsius."""

    city: City


class ToFahrenheit(BaseModel):
    """The same temperature in degrees Fahrenheit."""

    celsius: Celsius


ARGUMENTS: dict[str, type[BaseModel]] = {
    "get_temperature": GetTemperature,
    "to_fahrenheit": ToFahrenheit,
}


@dataclass
class TwoTools:
    """The tools, and the names of those that were called."""

    called: list[str] = field(default_factory=list)

    def get_temperature(self, city: City) -> int:
        """Return the temperature in a city, in degrees Celsius."""
        assert city in DEGREES, city
        self.called.append("get_temperature")
        return DEGREES[city]

    def to_fahrenheit(self, celsius: Celsius) -> int:
        """Return a temperature in degrees Fahrenheit."""
        assert type(celsius) is int, celsius
        assert -60 <= celsius <= 60, celsius
        self.called.append("to_fahrenheit")
        return round(celsius * 9 / 5 + 32)

    def call(self, name: str, arguments: str | dict[str, object]) -> str:
        """Check the arguments by the tool's schema, call it, and return its result as text."""
        model = ARGUMENTS[name]
        if isinstance(arguments, str):
            checked = model.model_validate_json(arguments, strict=True)
        else:
            checked = model.model_validate(arguments, strict=True)
        return str(getattr(self, name)(**checked.model_dump()))

    @property
    def left(self) -> list[str]:
        """The tools that were not called yet."""
        return [name for name in ARGUMENTS if name not in self.called]

    @property
    def choice(self) -> str:
        """The next turn's choice: "required" at first, then a tool's name, and "none" at last."""
        if not self.called:
            return "required"
        return self.left[0] if self.left else "none"

    def check(self, answer: object) -> None:
        """Check the end of a loop: both tools were called, and a text answers the question."""
        assert self.left == [], self.called
        assert isinstance(answer, str), answer
        assert answer.strip(), "the last answer is empty"
