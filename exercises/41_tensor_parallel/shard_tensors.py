"""Exercise shard_tensors of chapter 41 (core, 10 points, about 20 minutes).

Shard a checkpoint: return the rank's part of every tensor, by name. `PLAN`, `Split`,
`module_of` and `span` of `minigen.parallel.sharding` say how each module is split, and where.
The methods `rows` and `columns` of a `StoredTensor` cut it without reading it. Names are those
of Hugging Face checkpoints, such as `model.layers.3.mlp.down_proj.weight`, whatever the file's
format is. Some modules also have a bias, a tensor with one axis, such as
`model.layers.3.self_attn.q_proj.bias`: over all ranks, it must be added exactly once to every
output.

Check it:     minigen check exercises/41_tensor_parallel/shard_tensors.py
With a hint:  minigen check exercises/41_tensor_parallel/shard_tensors.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import LLM, SamplingParams

    with using(41, shard_tensors=mine):  # in rank 0; the other ranks are other processes
        llm = LLM.load(weights="float32", tensor_parallel_size=3)
    print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=12)).text)
    llm.close()

Harder: Weights of 4 bits share a scale among 32 inputs of one row. For which numbers of ranks
can a matrix with 1,536 inputs be cut by rows so that no such group is cut? And one with 11,008
inputs?
"""

# exercise: minigen.parallel.sharding.shard_tensors
from collections.abc import Mapping

from minigen.checkpoint.model_config import ModelConfig
from minigen.checkpoint.safetensors import StoredTensor


def shard_tensors(
    tensors: Mapping[str, StoredTensor], config: ModelConfig, rank: int, num_ranks: int
) -> dict[str, StoredTensor]:
    """Return the rank's shard of every tensor, still in the file; only these bytes are read.

    The bias of a row split is added once, so only rank 0 has it.
    """
    raise NotImplementedError  # your turn
