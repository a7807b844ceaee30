r"""Exercise pattern_of_schema of chapter 53 (core, 10 points, about 20 minutes).

Turn a flat JSON schema into a regex. The object has all properties of `schema["properties"]`,
in their order, written as `json.dumps(value, ensure_ascii=False)` writes them: `": "` after a
name, `", "` between properties. A property has an `enum` (a list of values of any type), or the
`type` string, integer, boolean or null. A string has at most `maxLength` characters, if that is
given; a backslash begins one of the escapes `\"`, `\\`, `\/`, `\b`, `\f`, `\n`, `\r`, `\t`,
which count as one character, and no control character (below U+0020) may stand in it. An
integer has one to nine digits, without zeros in front, and may be negative. Any other property
raises ValueError, and so does any other keyword of a property, such as `minimum`: the regex
would not keep it. Use literal characters, groups, `|`, `*`, `?`, `{m,n}`, and classes such as
`[0-9]` and `[^"\\\x00-\x1f]`.

Check it:     minigen check exercises/53_structured_output/pattern_of_schema.py
With a hint:  minigen check exercises/53_structured_output/pattern_of_schema.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen import LLM, SamplingParams

    schema = {"properties": {"city": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}}}
    llm = LLM.load()
    params = SamplingParams(temperature=0, max_tokens=30, structured_outputs={"regex": mine(schema)})
    print(llm.generate("A city as JSON:", params).text)

Harder: Let a property be an object in its turn, and an array of at most three values. Then give
every property a chance to be absent: how does the length of the regex grow with their number?
"""

# exercise: minigen_course.ch53_structured_output.lesson.pattern_of_schema
from collections.abc import Mapping
from typing import Any


def pattern_of_schema(schema: Mapping[str, Any]) -> str:
    """Return a regex for the objects that a flat schema allows, in one way of writing each.

    All properties are written, in their order, with `": "` and `", "` between them, as
    `json.dumps(value, ensure_ascii=False)` does. A property is an `enum` of values, or has the
    `type` string (with `maxLength`, if that is given), integer (of at most nine digits), boolean or
    null. Raises `ValueError` for any other property, and for any other keyword of a property.
    """
    raise NotImplementedError  # your turn
