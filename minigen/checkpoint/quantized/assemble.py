"""Finds the quantised matrices of a checkpoint, by the `quantization_config` of its `config.json`.

Source: the configurations of transformers' quantizers, one per `quant_method`. The files say which
modules are quantised, and the configuration says how. A setting that could change a number is
supported or refused by name. Settings that only tell how a model was quantised are ignored.
"""

import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from minigen.checkpoint.config_json import Values
from minigen.checkpoint.quantized.compressed import CompressedTensors
from minigen.checkpoint.quantized.matrix import Parts, StoredMatrix, quantized_tensor
from minigen.checkpoint.quantized.methods import Awq, Bitsandbytes, Fp8, Gptq, Mxfp4
from minigen.checkpoint.safetensors import RawTensor, StoredTensor
from minigen.errors import ConfigError, UnsupportedError, WeightsError


@runtime_checkable
class Scheme(Protocol):
    """What a `quant_method` needs: its settings, and how to find a module's matrix."""

    def matrix(self, parts: Parts, shape: tuple[int, int]) -> StoredMatrix | None:
        """Return a module's matrix, or None if the module is not quantised."""

    def uses(self, name: str) -> bool:
        """Return whether a part of a quantised module is read with its matrix."""


_METHODS: dict[str, Callable[[Values], Scheme]] = {
    "gptq": Gptq.read,
    "awq": Awq.read,
    "compressed-tensors": CompressedTensors.read,
    "fp8": Fp8.read,
    "mxfp4": Mxfp4.read,
    "bitsandbytes": Bitsandbytes.read,
}


# Scales of activations, and of keys and values in a cache, which minigen keeps in its own types.
_OF_ACTIVATIONS = frozenset(
    "input_scale input_zero_point input_global_scale output_scale output_zero_point "
    "activation_scale q_scale k_scale v_scale k_zero_point v_zero_point".split()
)


def assemble(
    raw: Mapping[str, RawTensor],
    settings: Any,
    expected: Mapping[str, tuple[int, ...]],
    where: str,
) -> dict[str, StoredTensor]:
    """Return a quantised checkpoint's tensors under the names of a plain one.

    `expected` are the names and shapes of the model's tensors, and `where` names `config.json`.
    Raises `ConfigError`, `UnsupportedError`, `WeightsError` or `FileFormatError`.
    """
    scheme = _scheme(settings, where)
    modules: dict[str, tuple[int, int]] = {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in expected.items()
        if name.endswith(".weight") and len(shape) == 2
    }
    own: dict[str, dict[str, RawTensor]] = {}
    stored: dict[str, StoredTensor] = {}
    for name, each in raw.items():
        module = _module_of(name, modules)
        if name.rpartition(".")[2] in _OF_ACTIVATIONS:
            continue
        if module is None:
            stored[name] = each.stored()
        else:
            own.setdefault(module, {})[name.removeprefix(f"{module}.")] = each
    num_quantized = 0
    for module, tensors in own.items():
        parts = Parts(module, tensors)
        matrix = scheme.matrix(parts, modules[module])
        if matrix is None:
            _refuse_strays(parts, scheme)
        else:
            num_quantized += 1
            _refuse_twice(parts, scheme)
            stored[f"{module}.weight"] = quantized_tensor(f"{module}.weight", matrix)
        stored |= {
            f"{module}.{part}": each.stored()
            for part, each in tensors.items()
            if not (matrix is not None and scheme.uses(part))
            and not (part == "bias" and _is_surplus(f"{module}.bias", each, expected))
        }
    if num_quantized == 0:
        raise ConfigError(
            f"{where}: quantization_config says {settings['quant_method']!r}, but no tensor is "
            "stored that way."
        )
    return stored


def _scheme(settings: Any, where: str) -> Scheme:
    if not isinstance(settings, Mapping) or "quant_method" not in settings:
        raise ConfigError(
            f"{where}: quantization_config must be an object that names its quant_method, not "
            f"{reprlib.repr(settings)}."
        )
    method = settings["quant_method"]
    if method not in tuple(_METHODS):  # a tuple, because a wrong value may be unhashable
        raise UnsupportedError(
            f"{where}: quant_method is {reprlib.repr(method)}; minigen reads {', '.join(_METHODS)}."
        )
    return _METHODS[method](Values(settings, f"{where}: quantization_config", {}))


def _module_of(name: str, modules: Mapping[str, tuple[int, int]]) -> str | None:
    """Return the module that a tensor belongs to; a part's name may have dots, as bitsandbytes'."""
    ends = [match.start() for match in re.finditer(r"\.", name)]
    return next((name[:end] for end in reversed(ends) if name[:end] in modules), None)


def _refuse_strays(parts: Parts, scheme: Scheme) -> None:
    strays = [name for name in parts.raw if name != "weight" and scheme.uses(name)]
    if strays:
        raise WeightsError(f"{parts.where} has {', '.join(strays)}, but not the codes for them.")


def _refuse_twice(parts: Parts, scheme: Scheme) -> None:
    if "weight" in parts.raw and not scheme.uses("weight"):
        raise WeightsError(
            f"{parts.where} is stored twice, quantised and as a plain weight; remove one."
        )


def _is_surplus(name: str, bias: RawTensor, expected: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether this is the zero bias that AutoGPTQ writes for layers without a bias."""
    return name not in expected and (bias.tensor.is_meta or not bias.tensor.any())
