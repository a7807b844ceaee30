"""Check the subject of a commit: `python -m tools.commit_subject FILE`, as a commit-msg hook.

FILE holds the message. The subject is one line of at most 72 characters without a full stop at its
end, and it begins with an area (`kv_cache: share full blocks on fork`) or with a capital letter.
The body, if there is one, follows after an empty line. Merges and reverts keep git's own subjects.
"""

import re
import sys
from pathlib import Path

MOST_CHARACTERS = 72
BEGINS_WELL = re.compile(r"[\w./-]+(?:, [\w./-]+)*: \S|[A-Z]")
BY_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ")
SCISSORS = "# ------------------------ >8 ------------------------"


def complaint(message: str) -> str | None:
    """Return what is wrong with a commit's message in one sentence, or None.

    >>> complaint("kv_cache: share full blocks on fork")
    >>> complaint("share full blocks on fork")
    'Begin the subject with an area, as in "kv_cache: share blocks", or with a capital letter.'
    """
    text = message.partition(SCISSORS)[0]
    lines = [line.rstrip() for line in text.splitlines() if not line.startswith("#")]
    subject, *rest = "\n".join(lines).strip().splitlines() or [""]
    if not subject:
        return "The message is empty: write a subject."
    if subject.startswith(BY_GIT):
        return None
    if len(subject) > MOST_CHARACTERS:
        return (
            f"The subject has {len(subject)} characters; write at most {MOST_CHARACTERS}, and the "
            "story in the body."
        )
    if BEGINS_WELL.match(subject) is None:
        return (
            'Begin the subject with an area, as in "kv_cache: share blocks", or with a capital '
            "letter."
        )
    if subject.endswith("."):
        return "End the subject without a full stop."
    if rest and rest[0]:
        return "Leave an empty line between the subject and the body."
    return None


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.commit_subject FILE")
    if found := complaint(Path(sys.argv[1]).read_text(encoding="utf-8")):
        sys.exit(found)
