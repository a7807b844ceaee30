"""Bug hunt object_pattern of chapter 53 (core, 10 points, about 20 minutes).

**The report.** *Some answers run into `max_tokens`. They begin as valid JSON, then come blanks
and line ends until the limit, and the JSON is never closed. It depends on the prompt: most
answers are fine.* The grammar allowed any number of blanks between two tokens of JSON, so a
model that would rather write something else could write blanks for ever, and each of them was
legal (vLLM's issue 38696; oMLX's issue 2990 counted 60 of 262 calls in a night).

Find the mistake in the part below. Catch it with a test that fails on this part and passes on
every correct one. Then mend the part in the same file.

Check both:  minigen check exercises/53_structured_output/hunt_object_pattern.py
"""

# hunt: minigen_course.ch53_structured_output.hunt
import re

from minigen_course.ch53_structured_output.hunt import ObjectPattern


def object_pattern(names: list[str]) -> str:
    """Return a regex for a JSON object that has a whole number for each name, in this order.

    A space is allowed after each colon and comma, and the compact text without any blank as well.
    At most 16 blanks (spaces or line ends) in a row may stand anywhere.
    """
    blanks = r"[ \n]*"
    fields = (f'"{re.escape(name)}"{blanks}:{blanks}(0|[1-9][0-9]{{0,5}})' for name in names)
    return rf"\{{{blanks}" + f"{blanks},{blanks}".join(fields) + rf"{blanks}\}}"


def test_blanks(object_pattern: ObjectPattern) -> None:
    """Assert what every correct `object_pattern` does, and the one above does not."""
    raise NotImplementedError  # your turn
