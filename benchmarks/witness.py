"""Judges answers by the jsonschema library, with exact decimal numbers.

With binary ones, 0.07 would be no multiple of 0.01.
"""

import decimal
import json
import warnings
from typing import Any

import jsonschema

_EXACT = decimal.Context(prec=2000)
_LARGEST_EXPONENT = 10**17  # Decimal itself ends at 10^18; no schema has a bound out there


def failure(schema: Any, text: str) -> str | None:
    """Return why a text is not JSON that is valid by the schema, formats too; None if it is."""
    with decimal.localcontext(_EXACT), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Python's of sets in patterns
        try:
            value = _decimal(text)
        except ValueError as error:
            return f"no JSON: {error}"
        kind = jsonschema.Draft202012Validator
        validator = kind(_decimal(json.dumps(schema)), format_checker=kind.FORMAT_CHECKER)
        found = next(validator.iter_errors(value), None)
    return None if found is None else found.message


def _decimal(text: str) -> Any:
    return json.loads(text, parse_float=_number)


def _number(text: str) -> decimal.Decimal:
    """Return the number; an exponent past Decimal's range becomes one that is beyond all bounds."""
    digits, _, exponent = text.lower().partition("e")
    limit = _LARGEST_EXPONENT
    return decimal.Decimal(f"{digits}e{max(-limit, min(limit, int(exponent or 0)))}")
