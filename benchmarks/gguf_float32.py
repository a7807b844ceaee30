"""Write a GGUF file's numbers in float32, for engines that must compute with the same numbers."""

from pathlib import Path

import gguf

from minigen.checkpoint.gguf import read_gguf


def write_float32(source: Path, target: Path) -> None:
    """Write a copy of a GGUF with every tensor in float32; metadata and row order stay."""
    reader, file = gguf.GGUFReader(source), read_gguf(source)
    writer = gguf.GGUFWriter(target, file.metadata["general.architecture"])
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, element)
    for name, tensor in file.tensors.items():
        writer.add_tensor(name, tensor.dequantize().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
