"""Exercise read_safetensors_header of chapter 11 (warm-up, 5 points, about 15 minutes).

Read the header of a safetensors file, and return a `TensorEntry` for each tensor, by name.
`begin` and `end` must count from the first byte of the *file*; in the header they count from
the end of the header. Leave out `__metadata__`, which is no tensor. Raise `ValueError` for a
file that is cut short. Raise it also if the tensors do not cover the data exactly: in the order
of their offsets, the first one begins right after the header, each one begins where the one
before it ends, and the last one ends with the file. A file without tensors ends with its
header.

Check it:     minigen check exercises/11_weights/read_safetensors_header.py
With a hint:  minigen check exercises/11_weights/read_safetensors_header.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    import json
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from safetensors.torch import save_file

    from minigen_course.ch11_weights.reference import map_shards

    with TemporaryDirectory(ignore_cleanup_errors=True) as name, using(11, read_safetensors_header=mine):
        save_file({"norm": torch.ones(3)}, Path(name) / "model-1.safetensors")
        save_file({"key": torch.ones(2, 5)}, Path(name) / "model-2.safetensors")
        shards = {"norm": "model-1.safetensors", "key": "model-2.safetensors"}
        index = json.dumps({"weight_map": shards})
        (Path(name) / "model.safetensors.index.json").write_text(index)
        print(sorted(map_shards(Path(name))))

Harder: Refuse an entry whose dtype and shape do not take `end` - `begin` bytes, and a header
with the same name twice (`json.loads` has an option for it). What could an attacker gain from
each?
"""

# exercise: minigen_course.ch11_weights.reference.read_safetensors_header
from pathlib import Path

from minigen_course.ch11_weights.reference import TensorEntry


def read_safetensors_header(path: Path) -> dict[str, TensorEntry]:
    """Return the entry of each tensor of a safetensors file, by name.

    The offsets of an entry count from the first byte of the file. Raises `ValueError` for a file
    that is cut short, and for tensors that do not cover the bytes after the header exactly once.
    """
    raise NotImplementedError  # your turn
