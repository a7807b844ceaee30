"""Looking into a loaded model from a notebook."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from minigen import hub
from minigen.llm import LLM
from minigen.model.attention import attend_packed
from minigen.model.transformer import Transformer
from minigen.progress import shown_progress


def load_model(name: str = hub.DEFAULT_MODEL, **options: Any) -> LLM:
    """`LLM.load`, with bars while a model that is not on this machine yet is pulled."""
    if hub.find(name) is None:
        print(f"{name} is not on this machine yet: it is pulled now, once.")
        with shown_progress() as progress:
            hub.pull(name, progress=progress)
    return LLM.load(name, **options)


def transformer_of(llm: LLM) -> Transformer:
    """The model that a loaded engine runs."""
    model: Transformer = llm.engine.runner.model  # type: ignore[attr-defined]
    return model


@torch.inference_mode()
def next_logits(llm: LLM, text: str) -> Float[Tensor, " vocab"]:
    """What the model says of the token after `text`, computed at once and without a cache."""
    model = transformer_of(llm)
    token_ids = llm.tokenizer.encode(text)
    attend = attend_packed([len(token_ids)], llm.config.sliding_windows)
    hidden = model(torch.tensor(token_ids), torch.arange(len(token_ids)), attend)
    return model.logits(hidden[-1:])[0].float()
