"""Candidate questions of many kinds, to compare weight formats where float32 is sure.

Code makes all of them from the lists below, several times as many as will be sure, and none is
chosen by its answer. Patterns of several lines get different examples each time, so that no two
candidates share most of their text.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple


class Candidate(NamedTuple):
    """A prompt, and the kind of question that it is."""

    family: str
    prompt: str


COUNTRIES = (
    "France Germany Italy Spain Portugal Austria Hungary Greece Turkey Egypt Japan China India "
    "Russia Poland Sweden Norway Finland Denmark Ireland Canada Mexico Cuba Peru Chile Argentina "
    "Brazil Colombia Kenya Ethiopia Nigeria Ghana Morocco Iran Iraq Israel Jordan Thailand Vietnam "
    "Indonesia Australia Ukraine Romania Bulgaria Serbia Croatia Belgium Switzerland"
).split()
CAPITALS = (
    "Paris Berlin Rome Madrid Lisbon Vienna Budapest Athens Ankara Cairo Tokyo Beijing Delhi "
    "Moscow Warsaw Stockholm Oslo Helsinki Copenhagen Dublin Ottawa Mexico-City Havana Lima "
    "Santiago Buenos-Aires Brasilia Bogota Nairobi Addis-Ababa Abuja Accra Rabat Tehran Baghdad "
    "Jerusalem Amman Bangkok Hanoi Jakarta Canberra Kyiv Bucharest Sofia Belgrade Zagreb "
    "Brussels Bern"
).split()
OPPOSITES = (
    "hot/cold big/small up/down day/night fast/slow old/young happy/sad open/closed full/empty "
    "light/dark rich/poor high/low wet/dry hard/soft loud/quiet early/late long/short good/bad "
    "in/out left/right strong/weak clean/dirty near/far thick/thin first/last true/false "
    "love/hate war/peace begin/end buy/sell win/lose push/pull black/white north/south east/west "
    "inside/outside always/never more/less above/below before/after"
).split()
PLURALS = (
    "cat/cats dog/dogs house/houses tree/trees book/books car/cars table/tables chair/chairs "
    "box/boxes bus/buses city/cities baby/babies man/men woman/women child/children mouse/mice "
    "foot/feet tooth/teeth leaf/leaves knife/knives fish/fish bird/birds flower/flowers "
    "pencil/pencils window/windows apple/apples glass/glasses church/churches story/stories "
    "wolf/wolves goose/geese potato/potatoes hero/heroes key/keys shoe/shoes river/rivers "
    "star/stars door/doors cup/cups plate/plates"
).split()
PASTS = (
    "walk/walked play/played jump/jumped cook/cooked help/helped look/looked talk/talked "
    "work/worked call/called ask/asked clean/cleaned paint/painted watch/watched open/opened "
    "go/went see/saw eat/ate drink/drank write/wrote read/read sing/sang swim/swam run/ran "
    "take/took give/gave find/found think/thought buy/bought sleep/slept drive/drove"
).split()
WORDS = (
    "apple river stone cloud green table horse paper music light garden winter bridge silver "
    "orange window doctor flower market yellow island summer castle planet forest engine bottle "
    "candle mirror ladder pocket button kitten rabbit spider turtle monkey dragon carpet hammer "
    "needle basket blanket pillow pencil ticket wallet camera rocket tunnel harbor valley desert "
    "copper marble cotton velvet butter cheese pepper ginger lemon cherry melon banana carrot"
).split()
SENTENCES = """The old clock on the wall stopped at noon.
She bought three red apples and a loaf of bread.
Nobody knew where the small wooden boat had come from.
Our train leaves from platform nine in ten minutes.
The blue bird sang a song outside my window.
He forgot his umbrella on the bus again.
A tall man with a grey hat opened the door.
They painted the kitchen walls a bright shade of green.
My sister plays the violin in a small orchestra.
The children built a castle of sand near the water.
Every morning the baker lights his oven before dawn.
Two black cats were sleeping under the kitchen table.
The letter was written in a language nobody could read.
Snow covered the roofs and the roads were silent.
His grandfather worked in a coal mine for forty years.
The library closes early on the last day of the month.
We crossed the river on a narrow stone bridge.
A strong wind blew the papers off her desk.
The museum keeps a large collection of ancient coins.
Please send the finished report to the main office.
The dog buried its bone behind the garden shed.
Farmers in the valley grow grapes, olives and wheat.
The pilot saw a thin line of smoke on the horizon.
Water boils faster when the pot is covered with a lid.""".split("\n")
KNOWN = """one, two, three, four, five, six,
first, second, third, fourth, fifth,
ten, twenty, thirty, forty, fifty,
ten, nine, eight, seven, six,
one hundred, two hundred, three hundred, four hundred,
I, II, III, IV, V, VI,
2, 4, 8, 16, 32, 64,
1, 4, 9, 16, 25, 36,
1, 1, 2, 3, 5, 8, 13,
2, 3, 5, 7, 11, 13, 17,
Mercury, Venus, Earth, Mars, Jupiter,
red, orange, yellow, green, blue,
alpha, beta, gamma, delta,
do, re, mi, fa, sol,
spring, summer, autumn, winter, spring, summer, autumn,
north, east, south, west, north, east, south,
January, March, May, July,
Twinkle, twinkle, little star, how I wonder
Humpty Dumpty sat on a wall, Humpty Dumpty
Mary had a little lamb, its fleece was white
Row, row, row your boat, gently down the stream. Merrily, merrily, merrily,
To be, or not to be, that is
We hold these truths to be self-evident, that all men are
Four score and seven years ago our
Our Father, who art in heaven, hallowed be
In the beginning God created the heaven and
It was the best of times, it was the
Ask not what your country can do for you, ask what
I have a dream that one day this
We the People of the United States, in Order to form
Old MacDonald had a farm, E-I-E-I-O. And on his farm he had
London Bridge is falling down, falling down, falling down. London Bridge is
If you're happy and you know it, clap your hands. If you're happy and you
The wheels on the bus go round and round, round and round,
Happy birthday to you, happy birthday to
Jack and Jill went up the hill to fetch a pail
The quick brown fox jumps over
Lorem ipsum dolor sit amet, consectetur
Early to bed and early to rise, makes a man healthy,
Once upon a time, in a land far, far
An apple a day keeps the
Actions speak louder than words. Better late than never. The early bird catches
The United States of America, the United Kingdom of Great Britain and
I pledge allegiance to the Flag of the United States of
Copyright (c) 2015 Permission is hereby granted, free of charge, to any person
This program is distributed in the hope that it will be useful, but WITHOUT ANY""".split("\n")
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
LINES = (
    "x{n} = f({n})",
    "import module_{n}",
    'print("line {n}")',
    "    case {n}: return values[{n}];",
    "<li>Item {n}</li>",
    "INSERT INTO t VALUES ({n}, 'name{n}');",
    "assert square({n}) == {n} * {n}",
    "#define PIN_{n} {n}",
    "def test_{n}():\n    check({n})\n",
    '{{"id": {n}, "name": "user{n}"}},',
    "| row {n} | {n} |",
    "    if (i == {n}) goto label{n};",
    "rename file{n}.txt to copy{n}.txt",
    "let a{n} = b[{n}];",
    "export VAR{n}=value{n}",
    "Chapter {n} ......... page {n}0",
    "server{n} 10.0.0.{n} up",
    "step {n}/9 done",
    "self.w{n} = Linear({n}, {n})",
    "\\item Figure {n} shows case {n}.",
)
ASKED = {
    "capital, asked": "What is the capital of {}?",
    "continent, asked": "On which continent is {}?",
    "largest city, asked": "Name the largest city of {}.",
    "language, asked": "Which language do most people in {} speak?",
    "repeat a word, asked": "Repeat the word '{}' five times.",
}
SHOTS = {  # templates of a fact about two things
    "capital": ("The capital of {} is {}.", "Q: What is the capital of {}?\nA: {}"),
    "opposite": ("The opposite of {} is {}.", "Q: What is the opposite of {}?\nA: {}"),
    "plural": ("One {}, two {}.", "singular: {}; plural: {}."),
    "past": ("Today I {}, yesterday I {}.", "present: {}; past: {}."),
    "spelling": ("Spell {}: {}",),
    "first letter": ("The word {} begins with {}.",),
    "tag": ("<{}></{}>",),
}


def candidates() -> list[Candidate]:
    """Return all candidates, always the same ones in the same order."""
    return [
        *_asked(),
        *_with_examples(),
        *_counted(),
        *_repeated(),
        *_copied(),
        *_alphabets(),
        *_calendar(),
        *(Candidate("line of code", _lines(each)) for each in LINES),
        *(Candidate("known by heart", each) for each in KNOWN),
    ]


def _asked() -> Iterator[Candidate]:
    for family, question in ASKED.items():
        for country in COUNTRIES:
            yield Candidate(family, f"Question: {question.format(country)}\nAnswer:")
    for first in range(1, 60):
        prompt = f"Question: Count from {first} to {first + 9}.\nAnswer:"
        yield Candidate("count, asked", prompt)


def _with_examples() -> Iterator[Candidate]:
    """Yield prompts of four examples, and a fifth that ends where the answer would begin."""
    pairs = {
        "capital": list(zip(COUNTRIES, (each.replace("-", " ") for each in CAPITALS), strict=True)),
        "opposite": _pairs(OPPOSITES),
        "plural": _pairs(PLURALS),
        "past": _pairs(PASTS),
        "spelling": [(word, "-".join(word)) for word in WORDS],
        "first letter": [(word, word[0]) for word in WORDS],
        "tag": [(word, word) for word in WORDS],
    }
    for family, ways in SHOTS.items():
        for way, template in enumerate(ways):
            for group in _groups(pairs[family], 5, apart=way == 1):
                *shots, (asked, _) = group
                lines = [template.format(*shot) for shot in shots]
                beginning = template.split("{}")
                lines.append(beginning[0] + asked + beginning[1].rstrip())
                yield Candidate(family, "\n".join(lines))


def _pairs(texts: Sequence[str]) -> list[tuple[str, str]]:
    return [(one, other) for one, _, other in (each.partition("/") for each in texts)]


def _groups(
    items: Sequence[tuple[str, str]], size: int, apart: bool
) -> Iterator[Sequence[tuple[str, str]]]:
    """Yield groups that share no item: of neighbours, or of items as far apart as possible."""
    count = len(items) // size
    for number in range(count):
        if apart:
            yield items[number::count][:size]
        else:
            yield items[number * size : (number + 1) * size]


def _counted() -> Iterator[Candidate]:
    for step in (1, 2, 5, 10, 100, -1):
        for start in range(3 * abs(step), 80 * abs(step), 11 * abs(step)):
            numbers = [start + step * index for index in range(5)]
            yield Candidate("count on", ", ".join(map(str, numbers)) + ",")
    for first in range(2, 60, 6):
        sums = [f"{number} + 1 = {number + 1}" for number in range(first, first + 4)]
        yield Candidate("add one", "\n".join(sums) + "\n")


def _repeated() -> Iterator[Candidate]:
    for size in (3, 4):
        for start in range(0, len(WORDS) - size + 1, 2 * size):
            words = WORDS[start : start + size]
            yield Candidate("repeat a list", ", ".join([*words, *words, *words, words[0]]) + ",")


def _copied() -> Iterator[Candidate]:
    for shown, asked in zip(SENTENCES, [*SENTENCES[1:], SENTENCES[0]], strict=True):
        yield Candidate("copy", f"Text: {shown}\nCopy: {shown}\nText: {asked}\nCopy:")


def _alphabets() -> Iterator[Candidate]:
    upper = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    for letters, between in (
        (upper, " "),
        (upper.lower()[2:], ", "),
        (upper[::-1], ", "),
        (upper[::2], "-"),
    ):
        for start in range(0, len(letters) - 9, 4):
            yield Candidate("alphabet", between.join(letters[start : start + 7]) + between.rstrip())


def _calendar() -> Iterator[Candidate]:
    for names in (DAYS, MONTHS):
        for first in range(0, len(names) - 1, 3):
            *shown, last = [(names * 2)[first + index] for index in range(5)]
            yield Candidate("calendar", "\n".join([*shown, last]) + "\n")
            lines = [f"{name} comes before {then}." for name, then in pairwise([*shown, last])]
            yield Candidate("calendar", "\n".join([*lines, f"{last} comes before"]))


def _lines(template: str) -> str:
    return "".join(template.format(n=number) + "\n" for number in range(1, 5))
