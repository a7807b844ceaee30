"""Bug hunt seen_text of chapter 35 (core, 10 points, about 20 minutes).

**The report.** *With more calibration windows the quantised model comes closer and closer to
the float one. With very many, its perplexity is the best that I have seen at 3 bits. On another
text of the same kind, more windows hardly help beyond some number. I have made sure that no
test window is used for calibration.* A method that adapts a weight to its calibration text must
be judged on text that it has not seen. Otherwise the test measures how well it remembers.

Find the mistake in the part below. Catch it with a test that fails on this part and passes on
every correct one. Then mend the part in the same file.

Check both:  minigen check exercises/35_quantization/hunt_seen_text.py
"""

# hunt: minigen_course.ch35_quantization.hunts.seen_text
import random

from minigen_course.ch35_quantization.hunts.seen_text import SplitText


def split_text(
    num_tokens: int, length: int, num_calibration: int, num_test: int, seed: int
) -> tuple[list[int], list[int]]:
    """Return the windows of a text to calibrate on and those to test on, by their first tokens.

    Each window has `length` adjacent tokens. No start occurs twice, no token is in two test
    windows, and none is in a calibration window and in a test window. `seed` draws the calibration
    windows alone: results can be compared only if the test is always the same. The text has at
    least four times as many tokens as all windows together.
    """
    step = num_tokens // num_test
    test = [number * step for number in range(num_test)]
    free = [start for start in range(num_tokens - length + 1) if start not in test]
    return random.Random(seed).sample(free, num_calibration), test


def test_split(split_text: SplitText) -> None:
    """Assert what every correct `split_text` does, and the one above does not."""
    raise NotImplementedError  # your turn
