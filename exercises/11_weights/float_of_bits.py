"""Exercise float_of_bits of chapter 11 (core, 10 points, about 20 minutes).

Return the value of a floating-point number from its bits, which come as a text of "0" and "1":
the sign, then `exponent_bits` bits of exponent, then the mantissa. A stored exponent of zeros
only is a subnormal number (or zero, which keeps its sign). A stored exponent of ones only is
infinity if the mantissa is zero, otherwise nan.

Check it:     minigen check exercises/11_weights/float_of_bits.py
With a hint:  minigen check exercises/11_weights/float_of_bits.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen_course.ch11_weights import figures
    from minigen_course.figures.explore import picture

    with using(11, float_of_bits=mine):
        drawn = figures.number_bits("-0.15625", "1")
    picture(drawn, "A number in seven formats; four of the values were read by your function.")

Harder: FP8 E4M3 has no infinity: a stored exponent of ones is one like others, and only the
last pattern, all ones, is nan. Which is its largest number? Write the other direction, too: the
nearest number of a format, and its bits.
"""

# exercise: minigen_course.ch11_weights.number_formats.float_of_bits
def float_of_bits(bits: str, exponent_bits: int) -> float:
    """Return the number that bits stand for: the sign first, then exponent and mantissa.

    A stored exponent of zeros means a subnormal number, one of ones means infinity (if the mantissa
    is zero) or nan.

    >>> float_of_bits("1" + "01111100" + "01000000000000000000000", exponent_bits=8)
    -0.15625
    """
    raise NotImplementedError  # your turn
