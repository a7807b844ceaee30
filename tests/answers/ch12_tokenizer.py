"""Answers to the exercises of chapter 12."""

import codecs
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from heapq import heappop, heappush
from itertools import groupby, pairwise
from typing import Any

from minigen_course.ch12_tokenizer.reference import (
    Pair,
    merge_pair,
    most_common_pair,
    pieces_of,
)
from tests.answers import Answers

Words = Sequence[tuple[Sequence[bytes], int]]


def counted(words: Words) -> dict[Pair, int]:
    counts: dict[Pair, int] = defaultdict(int)
    for parts, times in words:
        for place in range(len(parts) - 1):
            counts[parts[place], parts[place + 1]] += times
    return counts


def pair_by_sorting(words: Words) -> Pair | None:
    """Right: sorts all pairs, by count and then by the pair."""
    ranked = sorted((count, pair) for pair, count in counted(words).items())
    return ranked[-1][1] if ranked else None


def pair_in_two_steps(words: Words) -> Any:
    """Right: finds the highest count first, then the greatest pair that has it; returns a list."""
    counts = counted(words)
    if not counts:
        return None
    most = max(counts.values())
    return list(max(pair for pair, count in counts.items() if count == most))


def wrong_pair(name: str) -> Callable[[Words], Any]:
    def part(words: Words) -> Any:
        if name == "ignores how often a word occurs":
            words = [(parts, 1) for parts, _ in words]
        if name == "crosses words":
            words = [([each for parts, _ in words for each in parts], 1)]
        if name == "each word once":
            words = list({tuple(parts): (parts, times) for parts, times in words}.values())
        counts = counted(words)
        if name == "without overlaps":
            counts = defaultdict(int)
            for parts, times in words:
                before: Pair | None = None
                for each in pairwise(parts):
                    counts[each] += 0 if each == before else times
                    before = None if each == before else each
        if name == "the joined bytes":
            joined = Counter[bytes]()
            for each, count in counts.items():
                joined[b"".join(each)] += count
            best = max(joined.values(), default=0)
            found = [each for each in counts if joined[b"".join(each)] == best]
            return max(found, default=None)
        if not counts and name != "an error without pairs":
            return () if name == "an empty pair" else None
        match name:
            case "first of equals":
                return max(counts, key=counts.__getitem__)
            case "least of equals":
                return min(counts, key=lambda pair: (-counts[pair], pair))
            case "last of equals":
                return max(reversed(counts), key=counts.__getitem__)
            case "rarest":
                return min(counts, key=lambda pair: (counts[pair], pair))
            case "with its count":
                best = max(counts, key=lambda pair: (counts[pair], pair))
                return best, counts[best]
            case "longest of equals":
                return max(counts, key=lambda pair: (counts[pair], len(b"".join(pair)), pair[::-1]))
        return max(counts, key=lambda pair: (counts[pair], pair))

    return part


WRONG_PAIRS = [
    *("ignores how often a word occurs", "crosses words", "each word once", "without overlaps"),
    *("the joined bytes", "an error without pairs", "an empty pair", "first of equals"),
    *("least of equals", "last of equals", "rarest", "with its count", "longest of equals"),
]


def merged_by_a_stack(parts: Sequence[bytes], pair: Pair) -> list[bytes]:
    """Right: puts parts on a stack, and joins its last two where they are the pair."""
    stack: list[bytes] = []
    joined = False  # a part that was just joined is not the left half of the next pair
    for part in parts:
        if stack and not joined and (stack[-1], part) == pair:
            stack[-1] += part
            joined = True
        else:
            stack.append(part)
            joined = False
    return stack


def merged_by_an_iterator(parts: Sequence[bytes], pair: Pair) -> list[bytes]:
    """Right: skips a part if the one before it has taken it."""
    merged, taken = [], False
    for place, part in enumerate(parts):
        if taken:
            taken = False
            continue
        taken = tuple(parts[place : place + 2]) == tuple(pair)
        merged.append(part + parts[place + 1] if taken else part)
    return merged


def wrong_merge(name: str) -> Callable[..., Any]:
    def part(parts: list[bytes], pair: Pair) -> Any:
        left, right = pair
        if name == "in place":
            place = 0
            while place + 1 < len(parts):
                if (parts[place], parts[place + 1]) == pair:
                    parts[place : place + 2] = [left + right]
                place += 1
            return parts
        if name == "from the right":
            return [
                each[::-1]
                for each in merge_pair([p[::-1] for p in parts][::-1], (right[::-1], left[::-1]))
            ][::-1]
        merged: list[bytes] = []
        place = 0
        while place < len(parts):
            here, after = parts[place], parts[place + 1] if place + 1 < len(parts) else b""
            same = (here, after) == pair
            if name == "by the joined bytes":
                same = bool(after) and here + after == left + right
            if name == "either order":
                same = {here, after} == {left, right} and bool(after)
            if name == "only the first" and any(each == left + right for each in merged):
                same = False
            if name == "forgets the last" and not after:
                break
            if name == "steps over the right part only" and same:
                merged.append(left + right)
                place += 1
                continue
            if name == "keeps both" and same:
                merged += [left + right, left, right]
            elif name == "drops the pair" and same:
                pass
            else:
                merged.append(left + right if same else here)
            place += 2 if same else 1
        return tuple(map(bytes.decode, merged)) if name == "as text" else merged

    return part


WRONG_MERGES = [
    *("in place", "from the right", "by the joined bytes", "either order", "only the first"),
    *("forgets the last", "steps over the right part only", "keeps both", "drops the pair"),
    "as text",
]


def singles(counts: Mapping[bytes, int]) -> list[tuple[list[bytes], int]]:
    return [([bytes([byte]) for byte in word], times) for word, times in counts.items()]


def train_incrementally(counts: Mapping[bytes, int], num_merges: int) -> list[Pair]:
    """Right: corrects the counts of the pairs that a merge has changed."""
    words = singles(counts)
    found: Counter[Pair] = Counter()
    places: dict[Pair, set[int]] = defaultdict(set)
    for place, (parts, times) in enumerate(words):
        for pair in pairwise(parts):
            found[pair] += times
            places[pair].add(place)
    merges: list[Pair] = []
    for _ in range(num_merges):
        best = max(
            (pair for pair in found if found[pair] > 0),
            key=lambda pair: (found[pair], pair),
            default=None,
        )
        if best is None:
            break
        merges.append(best)
        for place in list(places[best]):
            parts, times = words[place]
            for pair in pairwise(parts):
                found[pair] -= times
                places[pair].discard(place)
            words[place] = (merge_pair(parts, best), times)
            for pair in pairwise(words[place][0]):
                found[pair] += times
                places[pair].add(place)
    return merges


def train_with_lists(counts: Mapping[bytes, int], num_merges: int) -> Any:
    """Right: a dictionary of words as tuples; merges are lists."""
    words = {tuple(parts): times for parts, times in singles(counts)}
    merges: list[list[bytes]] = []
    while len(merges) != num_merges and (best := most_common_pair(list(words.items()))):
        merges.append([*best])
        words = {tuple(merge_pair(parts, best)): times for parts, times in words.items()}
    return merges


def wrong_training(name: str) -> Callable[..., Any]:
    def part(counts: dict[bytes, int], num_merges: int) -> Any:
        words = singles(counts)
        if name == "each word once":
            words = [(parts, 1) for parts, _ in words]
        if name == "one long word":
            words = [([each for parts, times in words for each in parts * times], 1)]
        if name == "characters":
            words = [([c.encode() for c in bytes(w).decode()][::-1], n) for w, n in counts.items()]
        merges: list[Any] = []
        for _ in range(num_merges + (name == "one too many")):
            best: Any = most_common_pair(words)
            if name == "first of equals" and best is not None:
                best = max(counted(words).items(), key=lambda each: each[1])[0]
            if name == "least of equals" and best is not None:
                best = min(counted(words).items(), key=lambda each: (-each[1], each[0]))[0]
            if best is None and name != "never stops early":
                break
            if name == "never merges a pair that occurs once" and counted(words)[best] < 2:
                break
            if name == "joined bytes":
                merges.append(b"".join(best))
            else:
                merges.append(best)
            if name == "merges nothing":
                continue
            words = [(merge_pair(parts, best), times) for parts, times in words]
            if name == "merges the first word only":
                words = words[:1] + [(parts, times) for parts, times in singles(counts)[1:]]
        if name == "empties the counts":
            counts.clear()
        if name == "reversed":
            return merges[::-1]
        if name == "the vocabulary":
            return [b"".join(each) for each in merges]
        return dict.fromkeys(merges) if name == "a dictionary" else merges

    return part


WRONG_TRAININGS = [
    *("each word once", "one long word", "characters", "one too many", "first of equals"),
    *("least of equals", "never stops early", "never merges a pair that occurs once"),
    *("joined bytes", "merges nothing", "merges the first word only", "empties the counts"),
    *("reversed", "the vocabulary", "a dictionary"),
]


def split_by_one_pattern(text: str) -> list[str]:
    """Right: numbers are the first alternative, and a number ends a run of white space."""
    return pieces_of(
        r"\p{N}|'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+", text
    )


def kind_of(character: str) -> str:
    if character.isalpha():
        return "letter"
    if character.isnumeric():
        return "number"
    return "space" if character.isspace() else "other"


def split_by_hand(text: str) -> list[str]:
    """Right: no pattern at all, but Python's own classes of characters."""
    words, place = [], 0
    while place < len(text):
        rest = text[place:]
        short = next(
            (c for c in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d") if rest.startswith(c)), None
        )
        runs = [(kind, len(list(run))) for kind, run in groupby(rest, kind_of)]
        kind, length = runs[0]
        if short:
            length = len(short)
        elif kind == "number":
            length = 1
        elif kind == "space" and len(runs) > 1 and runs[1][0] != "number":
            if length > 1:
                length -= 1
            elif rest[0] == " ":
                length += runs[1][1]
        words.append(rest[:length])
        place += length
    return words


SPLITS = {
    "white space only": r"\S+|\s+",
    "space behind the word": r"'s|'t|'re|'ve|'m|'ll|'d|\p{L}+ ?|\p{N}|[^\s\p{L}\p{N}]+ ?|\s+",
    "no contractions": r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+",
    "any case": r"\p{N}|(?i:'s|'t|'re|'ve|'m|'ll|'d)| ?\p{L}+| ?[^\s\p{L}\p{N}]+"
    r"|\s+(?![^\s\p{N}])|\s+",
    "whole numbers": r"'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "a space before a number": r" ?\p{N}|'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?[^\s\p{L}\p{N}]+"
    r"|\s+(?!\S)|\s+",
    "digits only": r"[0-9]|'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?[^\s\p{L}\d]+|\s+(?!\S)|\s+",
    "words of \\w": r"\p{N}|'(?:[stmd]|re|ve|ll)| ?[^\W\p{N}]+| ?[^\s\w]+|\s+(?![^\s\p{N}])|\s+",
    "letters of English": r"\p{N}|'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[^\sA-Za-z\p{N}]+"
    r"|\s+(?![^\s\p{N}])|\s+",
    "white space is greedy": r"\p{N}|'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+",
    "white space gives back before a number": r"\p{N}|'(?:[stmd]|re|ve|ll)| ?\p{L}+"
    r"| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "each sign alone": r"\p{N}|'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?[^\s\p{L}\p{N}]"
    r"|\s+(?![^\s\p{N}])|\s+",
    "any white space before a word": r"\p{N}|'(?:[stmd]|re|ve|ll)|\s?\p{L}+|\s?[^\s\p{L}\p{N}]+"
    r"|\s+(?![^\s\p{N}])|\s+",
}


def wrong_split(name: str) -> Callable[[str], Any]:
    if name == "stripped":
        return lambda text: [word.strip() or word for word in split_by_hand(text)]
    if name == "bytes":
        return lambda text: [word.encode() for word in split_by_hand(text)]
    if name == "drops white space":
        return lambda text: [word for word in split_by_hand(text) if word.strip()]
    return lambda text: pieces_of(SPLITS[name], text)


WRONG_SPLITS = [*SPLITS, "stripped", "bytes", "drops white space"]


def encode_first_of_all(word: bytes, ranks: Mapping[Pair, int]) -> list[bytes]:
    """Right: joins one occurrence in each round, the leftmost of the lowest rank."""
    parts = [bytes([byte]) for byte in word]
    while len(parts) > 1:
        rank, place = min(
            (ranks.get(pair, float("inf")), place) for place, pair in enumerate(pairwise(parts))
        )
        if rank == float("inf"):
            break
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def encode_by_all_merges(word: bytes, ranks: Mapping[Pair, int]) -> list[bytes]:
    """Right: tries every merge in the order of ranks."""
    parts = [bytes([byte]) for byte in word]
    for pair in sorted(ranks, key=ranks.__getitem__):
        if len(parts) > 1:
            parts = merge_pair(parts, pair)
    return parts


def wrong_encoding(name: str) -> Callable[..., Any]:
    def part(word: bytes, ranks: Mapping[Pair, int]) -> Any:
        parts = [bytes([byte]) for byte in word]
        if name == "longest token from the left":
            tokens = {b"".join(pair) for pair in ranks} | set(parts)
            out = []
            while word:
                size = max(n for n in range(1, len(word) + 1) if word[:n] in tokens)
                out.append(word[:size])
                word = word[size:]
            return out
        if name == "one pass":
            for pair in ranks:
                if pair in set(pairwise(parts)):
                    return merge_pair(parts, pair)
            return parts
        order = ranks
        if name == "in the order of the dictionary":
            for pair in order:
                parts = merge_pair(parts, pair)
            return parts
        by_token: dict[bytes, int] = {}
        for pair, rank in ranks.items():
            by_token[b"".join(pair)] = min(rank, by_token.get(b"".join(pair), rank))
        while True:
            if name == "by the joined bytes":
                known = {
                    pair: by_token[b"".join(pair)]
                    for pair in pairwise(parts)
                    if b"".join(pair) in by_token
                }
            else:
                known = {pair: ranks[pair] for pair in pairwise(parts) if pair in ranks}
            if not known:
                break
            best = min(known, key=known.__getitem__)
            if name == "latest first":
                best = max(known, key=known.__getitem__)
            if name == "leftmost first":
                best = next(iter(known))
            if name == "longest first":
                best = max(known, key=lambda pair: len(b"".join(pair)))
            if name == "from the right":
                turned = merge_pair([p[::-1] for p in parts[::-1]], (best[1][::-1], best[0][::-1]))
                parts = [each[::-1] for each in turned[::-1]]
            else:
                parts = merge_pair(parts, best)
            if name == "stops after a merge of rank 0" and known[best] == 0:
                break
        if name == "nothing for the empty word" and not word:
            return None
        if name == "drops unknown bytes":
            known_bytes = {each for pair in ranks for each in pair}
            return [each for each in parts if len(each) > 1 or each in known_bytes]
        return tuple(b" ".join(parts).split()) if name == "as a tuple of words" else parts

    return part


WRONG_ENCODINGS = [
    *("longest token from the left", "one pass", "in the order of the dictionary"),
    *("by the joined bytes", "latest first", "leftmost first", "longest first", "from the right"),
    *("stops after a merge of rank 0", "nothing for the empty word", "drops unknown bytes"),
    "as a tuple of words",
]


class Node:
    """A part in a linked list."""

    def __init__(self, part: bytes, before: "Node | None") -> None:
        self.part, self.before = part, before
        self.after: Node | None = None
        self.alive = True


def encode_with_nodes(word: bytes, ranks: Mapping[Pair, int]) -> list[bytes]:
    """Right: a heap of linked nodes; an entry is out of date if one of its nodes has changed."""
    nodes: list[Node] = []
    for byte in word:
        nodes.append(Node(bytes([byte]), nodes[-1] if nodes else None))
    for one, two in pairwise(nodes):
        one.after = two
    heap: list[Any] = []
    places = {id(node): place for place, node in enumerate(nodes)}

    def push(node: Any) -> None:
        if node is None or node.after is None:
            return
        rank = ranks.get((node.part, node.after.part))
        if rank is not None:
            entry = (rank, places[id(node)], node.part, node.after.part)
            heappush(heap, entry)

    for each in nodes:
        push(each)
    while heap:
        _, place, left, right = heappop(heap)
        node: Any = nodes[place]
        if not node.alive or node.after is None or (node.part, node.after.part) != (left, right):
            continue
        node.after.alive = False
        node.part, node.after = left + right, node.after.after
        if node.after is not None:
            node.after.before = node
        push(node)
        push(node.before)
    return [node.part for node in nodes if node.alive]


def encode_with_remembered_ranks(word: bytes, ranks: Mapping[Pair, int]) -> list[bytes]:
    """Right: looks each pair up once, and keeps the answer."""
    known: dict[Pair, float] = {}
    parts = [bytes([byte]) for byte in word]
    while True:
        for pair in set(pairwise(parts)) - known.keys():
            known[pair] = ranks.get(pair, float("inf"))
        best = min(pairwise(parts), key=known.__getitem__, default=None)
        if best is None or known[best] == float("inf"):
            return parts
        parts = merge_pair(parts, best)


def halves(word: bytes, ranks: Mapping[Pair, int]) -> list[bytes]:
    """Wrong: cuts a long word into pieces of 100 bytes."""
    cut = [word[place : place + 100] for place in range(0, len(word), 100)]
    return [each for piece in cut for each in encode_first_of_all(piece, ranks)]


class Chat:
    """Right ways to encode a chat, as functions of what is put in the place of a message's text."""

    @staticmethod
    def whole_messages(messages: Any, render: Any, special_ids: Any, encode_text: Any) -> list[int]:
        """Right: every character of a message is replaced by a private one, and looked up again."""
        values = "".join(value for each in messages for value in each.values())
        unused = iter(
            chr(code) for code in range(0x100000, 0x10FFFE) if chr(code) not in set(values)
        )
        names = {character: next(unused) for character in dict.fromkeys(values)}
        back = {mark: character for character, mark in names.items()}
        hidden = [
            {key: "".join(names[c] for c in value) for key, value in each.items()}
            for each in messages
        ]
        rendered, ids, text, place = render(hidden), [], "", 0
        while place < len(rendered):
            found = [s for s in special_ids if rendered.startswith(s, place)]
            if not found:
                text += back.get(rendered[place], rendered[place])
                place += 1
                continue
            ids += [*(encode_text(text) if text else []), special_ids[max(found, key=len)]]
            text, place = "", place + len(max(found, key=len))
        return ids + (encode_text(text) if text else [])

    @staticmethod
    def special_tokens(messages: Any, render: Any, special_ids: Any, encode_text: Any) -> list[int]:
        """Right: the special tokens in messages get a private character after their first one."""
        values = "".join(value for each in messages for value in each.values())
        mark = next(chr(code) for code in range(0xE000, 0x10FFFE) if chr(code) not in values)
        hidden = [
            {
                key: "".join(c + mark if any(s[0] == c for s in special_ids) else c for c in value)
                for key, value in each.items()
            }
            for each in messages
        ]
        pattern = "|".join(map(re.escape, sorted(special_ids, key=len)[::-1]))
        ids: list[int] = []
        for part in re.split(f"({pattern})", render(hidden)):
            known = special_ids.get(part)
            ids += encode_text(part.replace(mark, "")) if known is None else [known]
        return ids


def wrong_chat(name: str) -> Callable[..., list[int]]:
    def part(messages: Any, render: Any, special_ids: Any, encode_text: Any) -> list[int]:
        specials = sorted(special_ids, key=len, reverse=name != "shortest first")
        pattern = "|".join(map(re.escape, specials))
        hide: dict[str, str] = {}
        if name == "removes them":
            sent = [{k: re.sub(pattern, "", v) for k, v in m.items()} for m in messages]
        elif name == "removes them again and again":
            sent = []
            for message in messages:
                new = dict(message)
                for key in new:
                    while re.search(pattern, new[key]):
                        new[key] = re.sub(pattern, "", new[key])
                sent.append(new)
        elif name == "puts a space in":
            sent = [
                {k: re.sub(pattern, lambda m: m[0][0] + " " + m[0][1:], v) for k, v in m.items()}
                for m in messages
            ]
        elif name == "as the engine does":
            sent = messages
        elif name == "html":
            sent = [{k: v.replace("<", "&lt;") for k, v in m.items()} for m in messages]
            hide = {"&lt;": "<"}
        elif name == "fixed marks":
            hide = {chr(0xF0000 + place): text[0] for place, text in enumerate(specials)}
            sent = [
                {k: v.translate({ord(t[0]): m for m, t in hide.items()}) for k, v in e.items()}
                for e in messages
            ]
            hide = {m: t[0] for m, t in hide.items()}
        elif name == "known words":
            hide = {"{{ content }}": "<"}
            sent = [{k: v.replace("<", "{{ content }}") for k, v in m.items()} for m in messages]
        else:
            values = "".join(v for m in messages for v in m.values())
            unused = iter(chr(c) for c in range(0x100000, 0x10FFFE) if chr(c) not in values)
            hide = {next(unused): first for first in {text[0] for text in specials}}
            marks = {ord(first): mark for mark, first in hide.items()}
            keys = {"content only": {"content"}}.get(name, {"content", "role"})
            sent = [
                {k: v.translate(marks) if k in keys else v for k, v in m.items()} for m in messages
            ]
            if name == "first message only":
                sent = sent[:1] + list(messages[1:])
            if name == "changes the messages":
                for message, new in zip(messages, sent, strict=True):
                    message.update(new)
        ids: list[int] = []
        for piece in re.split(f"({pattern})", render(sent)):
            if piece in special_ids:
                ids.append(special_ids[piece])
                continue
            for mark, first in hide.items():
                if name == "forgets to change back":
                    break
                piece = piece.replace(mark, first)
            if name == "each line alone":
                ids += [i for line in piece.splitlines(keepends=True) for i in encode_text(line)]
            elif name == "special again":
                for each in re.split(f"({pattern})", piece):
                    ids += [special_ids[each]] if each in special_ids else encode_text(each)
            else:
                ids += encode_text(piece)
        return ids

    return part


WRONG_CHATS = [
    *("removes them", "removes them again and again", "puts a space in", "as the engine does"),
    *("html", "fixed marks", "known words", "content only", "first message only"),
    *("changes the messages", "forgets to change back", "each line alone", "special again"),
    "shortest first",
]


class DecoderOfABuffer:
    """Right: bytes are kept, and the library says how many of them it could use."""

    def __init__(self, token_bytes: Any, skipped: Collection[int], drop_space: bool) -> None:
        self.token_bytes, self.skipped, self.drop_space = token_bytes, skipped, drop_space
        self.held = b""

    def push(self, token_id: int) -> str:
        if token_id in self.skipped:
            return ""
        self.held += self.token_bytes(token_id)
        return self.taken(final=False)

    def finish(self) -> str:
        return self.taken(final=True)

    def taken(self, final: bool) -> str:
        text, used = codecs.utf_8_decode(self.held, "replace", final)
        self.held = self.held[used:]
        if text and self.drop_space:
            self.drop_space = False
            text = text[1:] if text[0] == " " else text
        return text


class DecoderByLeadingBytes:
    """Right: counts by hand how many bytes the last character still needs."""

    INCOMPLETE = re.compile(
        rb"(?:[\xc2-\xdf]|\xe0[\xa0-\xbf]?|[\xe1-\xec\xee\xef][\x80-\xbf]?|\xed[\x80-\x9f]?"
        rb"|\xf0(?:[\x90-\xbf][\x80-\xbf]?)?|[\xf1-\xf3](?:[\x80-\xbf]{1,2})?"
        rb"|\xf4(?:[\x80-\x8f][\x80-\xbf]?)?)\Z"
    )

    def __init__(self, token_bytes: Any, skipped: Collection[int], drop_space: bool) -> None:
        self.token_bytes, self.skipped, self.first = token_bytes, skipped, drop_space
        self.held = b""

    def push(self, token_id: int) -> str:
        data = self.held + (b"" if token_id in self.skipped else self.token_bytes(token_id))
        tail = self.INCOMPLETE.search(data)
        end = tail.start() if tail else len(data)
        self.held = data[end:]
        return self.said(data[:end].decode(errors="replace"))

    def finish(self) -> str:
        return self.said(self.held.decode(errors="replace"))

    def said(self, text: str) -> str:
        if self.first and text:
            self.first = False
            return text.removeprefix(" ")
        return text


SHARED = codecs.getincrementaldecoder("utf-8")(errors="replace")


def wrong_decoder(name: str) -> type:
    class Wrong:
        def __init__(self, token_bytes: Any, skipped: Collection[int], drop_space: bool) -> None:
            self.token_bytes, self.skipped, self.drop_space = token_bytes, skipped, drop_space
            errors = {"ignores errors": "ignore", "strict": "strict"}.get(name, "replace")
            self.utf8 = codecs.getincrementaldecoder("utf-8")(errors=errors)
            if name == "shared":
                self.utf8 = SHARED
            self.ids: list[int] = []
            self.said = ""

        def push(self, token_id: int) -> Any:
            if token_id in self.skipped and name != "shows special tokens":
                if name == "a special token ends a character":
                    return self.utf8.decode(b"", final=True)
                if name == "a special token forgets":
                    self.utf8.reset()
                return ""
            data = self.token_bytes(token_id)
            match name:
                case "each alone":
                    return data.decode(errors="replace")
                case "latin-1":
                    return data.decode("latin-1")
                case "waits for no replacement":
                    self.ids.append(token_id)
                    joined = b"".join(map(self.token_bytes, self.ids)).decode(errors="replace")
                    if joined.endswith("\ufffd"):
                        return ""
                    new, self.said = joined.removeprefix(self.said), joined
                    return new
                case "all so far":
                    self.said += self.utf8.decode(data)
                    return self.said
                case "nothing for incomplete":
                    return self.utf8.decode(data) or None
            text = self.utf8.decode(data)
            if name == "loses what precedes a half" and self.utf8.getstate()[0]:
                return ""
            return self.dropped(text)

        def dropped(self, text: str) -> str:
            if not self.drop_space or name == "keeps the space":
                return text
            if name == "drops every space":
                return text.removeprefix(" ")
            if name == "drops by an empty text" or text:
                self.drop_space = False
            if name == "drops all spaces":
                return text.lstrip(" ")
            return text.removeprefix(" ")

        def finish(self) -> str:
            if name == "finish gives nothing":
                return ""
            if name == "waits for no replacement":
                joined = b"".join(map(self.token_bytes, self.ids)).decode(errors="replace")
                return joined.removeprefix(self.said)
            return self.dropped(self.utf8.decode(b"", final=True))

    return Wrong


WRONG_DECODERS = [
    *("each alone", "latin-1", "ignores errors", "strict", "waits for no replacement"),
    *("shows special tokens", "a special token ends a character", "a special token forgets"),
    *("all so far", "nothing for incomplete", "loses what precedes a half", "keeps the space"),
    *("drops every space", "drops by an empty text", "drops all spaces", "finish gives nothing"),
    "shared",
]


class WatcherOfTheWhole:
    """Right: looks at the whole text again for each piece."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.stops, self.include, self.stopped = list(stops), include, False
        self.text, self.shown = "", 0

    def push(self, text: str) -> str:
        if self.stopped:
            return ""
        self.text += text
        for end in range(1, len(self.text) + 1):
            ending = [stop for stop in self.stops if self.text[:end].endswith(stop)]
            if ending:
                self.stopped = True
                start = end - max(map(len, ending))
                return self.up_to(end if self.include else start)
        if self.include:
            return self.up_to(len(self.text))
        for start in range(len(self.text)):
            if any(stop.startswith(self.text[start:]) for stop in self.stops):
                return self.up_to(start)
        return self.up_to(len(self.text))

    def up_to(self, end: int) -> str:
        new = self.text[self.shown : end]
        self.shown = max(end, self.shown)
        return new

    def finish(self) -> str:
        return "" if self.stopped else self.up_to(len(self.text))


class WatcherByLetters:
    """Right: takes one letter after another."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.stops, self.include, self.stopped, self.held = tuple(stops), include, False, ""

    def push(self, text: str) -> str:
        return "".join(self.letter(each) for each in text)

    def letter(self, letter: str) -> str:
        if self.stopped:
            return ""
        text = self.held + letter
        found = sorted((stop for stop in self.stops if text.endswith(stop)), key=len)
        if found:
            self.stopped, self.held = True, ""
            return letter if self.include else text.removesuffix(found[-1])
        started = [i for i in range(len(text)) if any(s.startswith(text[i:]) for s in self.stops)]
        cut = started[0] if started else len(text)
        self.held = text[cut:]
        return letter if self.include else text[:cut]

    def finish(self) -> str:
        held, self.held = self.held, ""
        return "" if self.include else held


def wrong_watcher(name: str) -> Callable[..., Any]:
    class Wrong:
        kept: list[str] = [""]  # noqa: RUF012 - shared by mistake

        def __init__(self, stops: Sequence[str], include: bool = False) -> None:
            self.stops, self.include, self.stopped = stops, include, False
            if name != "shared":
                self.kept = [""]

        def push(self, text: str) -> str:
            if self.stopped and name != "goes on after the stop":
                return ""
            shown = len(self.kept[0]) if self.include else 0
            text = ("" if name == "each piece alone" else self.kept[0]) + text
            found = [(text.find(stop), stop) for stop in self.stops if stop in text]
            if found:
                self.stopped = name != "never says so"
                self.kept[0] = ""
                start, stop = min(found, key=lambda each: (each[0] + len(each[1]), each[0]))
                if name == "first in the list":
                    start, stop = found[0]
                if name == "starts first":
                    start, stop = min(found)
                if name == "shortest of equals":
                    start, stop = min(found, key=lambda e: (e[0] + len(e[1]), -e[0]))
                if self.include and name == "include shows the held again":
                    shown = 0
                include = self.include and name != "include forgotten"
                return text[shown : start + len(stop) if include else start]
            longest = max((len(stop) for stop in self.stops), default=1) - 1
            lengths: Sequence[int] = range(min(longest, len(text)), 0, -1)
            if name == "shortest beginning":
                lengths = range(1, min(longest, len(text)) + 1)
            if name == "holds one letter":
                lengths = range(min(1, longest, len(text)), 0, -1)
            if name == "first stop's beginning only":
                lengths = range(min(len(self.stops[0]) - 1, len(text)), 0, -1) if self.stops else []
            held = next((n for n in lengths if any(s.startswith(text[-n:]) for s in self.stops)), 0)
            if name == "holds as many as the longest":
                held = min(longest, len(text))
            if name == "holds nothing":
                held = 0
            certain = len(text) - held
            self.kept[0] = text[certain:]
            if self.include and name != "include holds back":
                return text[shown:]
            return text[:certain]

        def finish(self) -> str:
            if name == "finish gives nothing":
                return ""
            held, self.kept[0] = self.kept[0], ""
            return "" if self.include and name != "finish gives again" else held

    return Wrong


WRONG_WATCHERS = [
    *("shared", "goes on after the stop", "each piece alone", "never says so"),
    *("first in the list", "starts first", "shortest of equals", "include shows the held again"),
    *("include forgotten", "shortest beginning", "holds one letter", "holds nothing"),
    *("first stop's beginning only", "holds as many as the longest", "include holds back"),
    *("finish gives nothing", "finish gives again"),
]


_LENGTH = "max((len(stop) for stop in self.stops), default=1)"
LONGER = f"{_LENGTH} - 1 -> {_LENGTH} + 1"

ANSWERS = {
    "most_common_pair": Answers(
        right=(pair_by_sorting, pair_in_two_steps),
        wrong={name: wrong_pair(name) for name in WRONG_PAIRS},
        equivalent={},
    ),
    "merge_pair": Answers(
        right=(merged_by_a_stack, merged_by_an_iterator),
        wrong={name: wrong_merge(name) for name in WRONG_MERGES},
        equivalent={},
    ),
    "train": Answers(
        right=(train_incrementally, train_with_lists),
        wrong={name: wrong_training(name) for name in WRONG_TRAININGS},
        equivalent={},
    ),
    "split": Answers(
        right=(split_by_one_pattern, split_by_hand),
        wrong={name: wrong_split(name) for name in WRONG_SPLITS},
        equivalent={},
    ),
    "encode_word": Answers(
        right=(encode_first_of_all, encode_by_all_merges, encode_with_nodes),
        wrong={name: wrong_encoding(name) for name in WRONG_ENCODINGS},
        equivalent={},
    ),
    "encode_long": Answers(
        right=(encode_with_nodes, encode_with_remembered_ranks),
        wrong={
            **{name: wrong_encoding(name) for name in WRONG_ENCODINGS[1:]},
            "looks up all pairs again": encode_first_of_all,
            "pieces of 100 bytes": halves,
        },
        equivalent={},
    ),
    "encode_chat": Answers(
        right=(Chat.whole_messages, Chat.special_tokens),
        wrong={name: wrong_chat(name) for name in WRONG_CHATS},
        equivalent={"0 -> 1": "hiding the second character of a special token breaks it, too"},
    ),
    "StreamDecoder": Answers(
        right=(DecoderOfABuffer, DecoderByLeadingBytes),
        wrong={name: wrong_decoder(name) for name in WRONG_DECODERS},
        equivalent={},
    ),
    "StopWatcher": Answers(
        right=(WatcherOfTheWhole, WatcherByLetters),
        wrong={name: wrong_watcher(name) for name in WRONG_WATCHERS},
        equivalent={
            "1 -> 2 #3": "the default counts without stop strings only, where nothing can begin",
            LONGER: "a stop string that is whole has been found before its beginnings are sought",
        },
    ),
}
