"""What stands in a kernel's PTX, the assembly of NVIDIA's GPUs.

Source: NVIDIA, Parallel Thread Execution ISA.
"""

import re
from collections import Counter

_NOT_INSTRUCTIONS = ("//", ".", "{", "}", "$", "(", ")", "@!$")


def instructions(ptx: str) -> list[str]:
    """The instructions in order, without directives, labels and comments.

    >>> instructions("{\\n .reg .b32 %r<9>;\\n@%p1 ld.global.b32 %r1, [%rd1];\\n ret; // 1\\n}")
    ['@%p1 ld.global.b32 %r1, [%rd1];', 'ret;']
    """
    lines = (" ".join(line.split("//")[0].split()) for line in ptx.splitlines())
    return [line for line in lines if line.endswith(";") and not line.startswith(_NOT_INSTRUCTIONS)]


def operation(instruction: str) -> str:
    """What an instruction does, without the predicate before it and its operands.

    >>> operation("@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];")
    'ld.global.v4.b32'
    """
    return re.sub(r"^@!?%p\d+ ", "", instruction).split()[0].rstrip(";")


def memory_instructions(ptx: str) -> list[str]:
    """The instructions that load from the GPU's memory or store to it."""
    return [each for each in instructions(ptx) if re.match(r"(ld|st)\.global", operation(each))]


def num_operations(ptx: str) -> Counter[str]:
    """How often each operation stands there, by the first part of its name: "ld", "fma", "setp"."""
    return Counter(operation(each).split(".")[0] for each in instructions(ptx))
