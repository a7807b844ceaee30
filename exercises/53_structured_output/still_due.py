"""Exercise still_due of chapter 53 (warm-up, 5 points, about 10 minutes).

Follow a nested value through one character. A value is `x`, or any number of values between `[`
and `]`, or any number of values between `{` and `}`. `due` is a stack in a text, with its top
at the end: "v" as long as the first value is due, then one closing bracket for each bracket
that is open. Return the new stack, or None if the character is forbidden. When nothing is due
any more, the value is complete, and every character is forbidden.

Check it:     minigen check exercises/53_structured_output/still_due.py
With a hint:  minigen check exercises/53_structured_output/still_due.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    due = "v"
    for character in "[x{x}[]]":
        due = mine(due, character)
        print(character, "now due:", repr(due))

Harder: Add a comma that must stand between two values, as in JSON, and must not stand before a
bracket that closes. What else must the stack remember?
"""

# exercise: minigen_course.ch53_structured_output.lesson.still_due
def still_due(due: str, character: str) -> str | None:
    """Return what is due after one more character of a nested value; None if it is forbidden.

    A value is `x`, or any number of values between `[` and `]`, or between `{` and `}`. `due` is a
    stack, with its top at the end: at first "v" alone, since one value is due; then a closing
    bracket for each open one. When it is empty, the value is complete and nothing may follow.

    >>> still_due("v", "["), still_due("]", "{"), still_due("]}", "x"), still_due("]}", "]")
    (']', ']}', ']}', None)
    """
    raise NotImplementedError  # your turn
