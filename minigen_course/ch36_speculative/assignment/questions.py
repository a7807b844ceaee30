"""Questions on chapter 36 that need no code."""

from random import Random
from typing import Any

from matplotlib.figure import Figure

from minigen.sequence import num_matching
from minigen_course.figures import style
from minigen_course.grading.question import Question, Written


def _gain(random: Random) -> dict[str, Any]:
    return {
        "percent": random.choice((50, 60, 70, 80, 90)),
        "count": random.randint(3, 7),
        "cost": random.choice((1.2, 1.3, 1.4, 1.6, 1.9)),
    }


def _times_faster(percent: int, count: int, cost: float) -> float:
    return sum((percent / 100) ** place for place in range(count + 1)) / cost


def _overlap(random: Random) -> dict[str, Any]:
    tokens = ("tea", "milk", "water", "juice")
    while True:
        p, q = ([5 * each for each in _twentieths(random, len(tokens))] for _ in range(2))
        shared = sum(map(min, p, q))
        if 30 <= shared <= 90:
            return {
                "model": dict(zip(tokens, p, strict=True)),
                "drafter": dict(zip(tokens, q, strict=True)),
            }


def _twentieths(random: Random, size: int) -> list[int]:
    cuts = sorted(random.sample(range(1, 20), size - 1))
    return [high - low for low, high in zip([0, *cuts], [*cuts, 20], strict=True)]


def _accepted_percent(model: dict[str, int], drafter: dict[str, int]) -> float:
    return sum(map(min, model.values(), drafter.values()))


LETTERS = "abcdefgh"


def _steps(random: Random) -> dict[str, Any]:
    steps = []
    for _ in range(4):
        drafts = random.choices(LETTERS, k=random.randint(3, 5))
        own = [each if random.random() < 0.75 else random.choice(LETTERS) for each in drafts]
        steps.append(("".join(drafts), "".join([*own, random.choice(LETTERS)])))
    return {"steps": steps}


def _tokens_of(steps: list[tuple[str, str]]) -> float:
    return sum(1 + num_matching(list(map(ord, a)), list(map(ord, b))) for a, b in steps)


def _steps_figure(steps: list[tuple[str, str]]) -> Figure:
    """Draw the drafts of each step above the model's own tokens at their places."""
    made, axes = style.figure(8, 3.6)
    for number, (drafts, own) in enumerate(steps):
        for height, letters, colour in ((0.72, drafts, style.PALE), (0.28, own, "white")):
            for place, letter in enumerate(letters):
                box = {"boxstyle": "square,pad=0.35", "facecolor": colour, "edgecolor": style.QUIET}
                at = place, -number + height - 0.5
                axes.text(*at, letter, ha="center", va="center", fontsize=9, bbox=box)
    axes.set(xlim=(-0.7, 5.7), ylim=(0.5 - len(steps), 0.5), xticks=range(6))
    axes.set_yticks(range(0, -len(steps), -1), [f"step {each + 1}" for each in range(len(steps))])
    axes.set(xlabel="place behind the known text")
    style.title(axes, "Drafts (blue), and under them the model's own token at each place")
    return made


SELDOM, FULL = "the drafts are seldom right", "the batch is full"

TOO_FEW, PAYS = "too few drafts are asked for", "nothing: it pays"

Row = tuple[int, int, float, float]  # sequences, drafts of each, per cent right, cost of the step


def _log(random: Random) -> dict[str, Any]:
    cause = random.choice((SELDOM, FULL, TOO_FEW, PAYS))
    return {"rows": [_row(random, cause) for _ in range(4)]}


def _row(random: Random, cause: str) -> Row:
    sequences, drafts = random.randint(1, 3), random.randint(5, 7)
    percent, cost = random.randint(78, 90), random.randint(122, 140) / 100
    if cause == SELDOM:
        percent = random.randint(3, 9)
    if cause == FULL:
        sequences, cost = random.randint(40, 60), random.randint(500, 640) / 100
    if cause == TOO_FEW:
        drafts, percent, cost = 1, random.randint(96, 99), random.randint(103, 107) / 100
    return sequences, drafts, percent, cost


def _cause(rows: list[Row]) -> str:
    sequences, drafts, percent, _ = rows[0]
    if percent < 20:
        return SELDOM
    if sequences > 20:
        return FULL
    return TOO_FEW if drafts == 1 else PAYS


def _log_text(rows: list[Row]) -> str:
    lines = ["sequences  drafts each  right, if those before are  time of the step  tokens/s"]
    for sequences, drafts, percent, cost in rows:
        gain = _times_faster(int(percent), drafts, cost)
        lines.append(
            f"{sequences:9}  {drafts:11}  {percent:24} %  {cost:10.2f} times  {gain:.2f} x"
        )
    return "\n".join(lines)


QUESTIONS = {
    "gain": Question(
        "estimate",
        "Each draft is right with a probability of {percent} % if those before it are. A step "
        "with {count} drafts takes {cost} times as long as a step without drafts. How many times "
        "as many tokens per second does the engine write with {count} drafts per step?",
        "acceptance, drafts per step, cost of the step",
        _gain,
        _times_faster,
        "A step gives 1 + a + ... + a^{count} tokens on average, with a = {percent} / 100; divide "
        "by {cost}.",
        within=1.03,
    ),
    "accepted_percent": Question(
        "estimate",
        "For the next token, the model has the probabilities tea {model[tea]}, milk {model[milk]}, "
        "water {model[water]} and juice {model[juice]} per cent. The drafter has tea "
        "{drafter[tea]}, milk {drafter[milk]}, water {drafter[water]} and juice {drafter[juice]} "
        "per cent, and draws one token. With which probability, in per cent, does the classical "
        "rule (accept with the probability min(1, p / q)) accept it?",
        "both probabilities",
        _overlap,
        _accepted_percent,
        "A token is drafted with q and accepted with min(1, p / q), so it comes with min(p, q): "
        "add the smaller numbers of all tokens.",
        within=1.02,
    ),
    "tokens_of_steps": Question(
        "reading",
        "The figure shows four steps of one answer, with drafts and the model's own token at each "
        "place (sample and match). How many tokens do the four steps give together?",
        "drafts and samples",
        _steps,
        _tokens_of,
        "Each step gives its drafts up to the first one that differs from the token under it, and "
        "one token more.",
        within=1.0,
        figure=_steps_figure,
    ),
    "why_not_faster": Question(
        "diagnosis",
        "An engine was measured with speculation, four times. The last column compares its tokens "
        "per second with those of the same load without speculation. What keeps it from gaining "
        "more?",
        "the batch, the drafts, how many are right, the time of a step",
        _log,
        _cause,
        "Compare the share of right drafts, the time of the step and the number of drafts: a full "
        "batch pays for every row, and drafts that are nearly always right are too few.",
        choices=(SELDOM, FULL, TOO_FEW, PAYS),
        figure=_log_text,
    ),
}

WRITTEN = {
    "filters_and_q": Written(
        "An engine filters the drafter's probabilities by top-k, draws drafts from the filtered "
        "ones, and keeps the unfiltered ones as q for the rule min(1, p / q). p is filtered. Which "
        "drafts are accepted too often? Does the text change, and what does the acceptance look "
        "like? Which q is right, and how would you test it?",
        "Filtering divides the kept probabilities by their sum, which is below 1, so the "
        "unfiltered q of a kept token is smaller than the probability with which it was drawn. p "
        "/ q is then too large: tokens that the drafter finds likelier than the model does are "
        "accepted too often, and the redraw takes too little of tokens that the drafter has cut. "
        "So the text is no longer distributed as the model's, while the acceptance looks better "
        "than it should. q must be what the draft was really drawn from. A test adds up the "
        "chances of all tokens exactly, or draws many and compares with p by a chi-square test.",
        {
            "the unfiltered q is smaller than the chance with which the draft was drawn": 3,
            "likely drafts are accepted too often, and the acceptance looks better": 3,
            "the text is no longer distributed as the model's": 2,
            "q is what was drawn from; a test by exact chances or chi-square": 2,
        },
    ),
    "same_text": Written(
        "With sample and match, an answer at temperature 1 is the same text with and without "
        "speculation, whatever the drafter proposes. Why? Name the two things that it needs of "
        "the engine. Would the text also be the same with the classical rule?",
        "The step draws the model's own token at every place, and a draft only counts if it is "
        "equal to it. So every token of the answer is one that the model drew itself. Two things "
        "are needed. The random number of a place must depend on the seed and the place alone, "
        "and not on how many steps there were. And the logits of a place must be the same in a "
        "step of several rows as in a step of one row. The classical rule gives the same "
        "distribution, but another text, because it uses its draws in another way.",
        {
            "every token is drawn by the model itself; drafts are only compared": 4,
            "the random number depends on seed and place alone": 2,
            "the logits of a place do not depend on the other rows of the step": 2,
            "the classical rule keeps the distribution, not the text": 2,
        },
    ),
}
