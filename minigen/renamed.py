"""Names of minigen before its vocabulary was the field's: an old one is refused with the new one.

There are no aliases: one idea has one name.
"""

from collections.abc import Collection, Iterable

from minigen.errors import OptionError

OPTIONS = {
    "max_sequences": "max_num_seqs",
    "max_batch_tokens": "max_num_batched_tokens",
    "kv_memory": "kv_cache_memory",
    "tensor_parallel": "tensor_parallel_size",
    "attend": "attention_backend",
}
METHODS = {"next_batch": "schedule", "join": "acquire", "leave": "release"}  # of a user's own part


def refuse_old_options(names: Iterable[str]) -> None:
    """Raise `OptionError` for a keyword of `LLM.load` that has another name now."""
    for name in names:
        if name in OPTIONS:
            raise OptionError(f"The option {name} is called {OPTIONS[name]} now.")


def refuse_old_flags(words: Iterable[str]) -> None:
    """Raise `OptionError` for a word of a command line that is an old option, as in --kv-memory."""
    flags = {_flag(old): _flag(new) for old, new in OPTIONS.items()}
    for word in words:
        flag = word.partition("=")[0]
        if flag == "--":  # what follows is no option
            return
        if flag in flags:
            raise OptionError(f"The option {flag} is called {flags[flag]} now.")


def renamed_methods(part: object, lacking: Collection[str]) -> str:
    """Say what to rename in `part`, which has some of its missing methods by their old names.

    >>> class Scheduler:
    ...     def next_batch(self): ...
    >>> renamed_methods(Scheduler(), ["schedule", "commit"])
    'next_batch is called schedule now (`minigen migrate FILE` renames what has changed)'
    """
    found = [old for old, new in METHODS.items() if new in lacking and hasattr(part, old)]
    if not found:
        return ""
    said = ", ".join(f"{old} is called {METHODS[old]} now" for old in found)
    return f"{said} (`minigen migrate FILE` renames what has changed)"


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")
