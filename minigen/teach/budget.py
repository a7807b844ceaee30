"""Where a model's parameters are, and what one token costs: from its shape alone."""

from dataclasses import dataclass

from minigen.config import ModelConfig
from minigen.teach.capacity import MODELS, config_of


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Llama-type model that decide its parameters, its work and its memory."""

    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool

    @classmethod
    def of(cls, config: ModelConfig) -> "ModelShape":
        """A loaded model's shape."""
        return cls(
            hidden=config.hidden,
            layers=config.num_layers,
            q_heads=config.q_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            ffn=config.ffn,
            vocab=config.vocab_size,
            tied=config.tied_embeddings,
        )

    @property
    def parameters(self) -> int:
        """All numbers that the model learned."""
        return sum(part.parameters for part in budget(self, 1))

    @property
    def multiplied(self) -> int:
        """Parameters that every token is multiplied with: all but norms and embedding look-up."""
        head = self.vocab * self.hidden
        linears = (part.parameters for part in budget(self, 1) if part.name in LINEARS)
        return head + sum(linears)

    def flops(self, context: int) -> int:
        """Floating-point operations of one token that looks at `context` tokens, itself one."""
        return sum(part.flops for part in budget(self, context))

    def kv_numbers(self, context: int) -> int:
        """Numbers of keys and values that so many tokens keep."""
        return 2 * self.layers * self.kv_heads * self.head_dim * context


@dataclass(frozen=True)
class Part:
    """A kind of tensor or work: its parameters, and operations (FLOPs) for one token."""

    name: str
    parameters: int
    flops: int


LINEARS = ("attention's products", "feed-forward")

SHAPES = {name: ModelShape.of(config_of(name)) for name in MODELS}


def budget(shape: ModelShape, context: int) -> tuple[Part, ...]:
    """A model's parts, from the embedding to the head, for a token that looks at `context` tokens.

    Counted are products of matrices; norms, rotations and softmax are some thousandths of them.
    A head that is the embedding itself has no parameters of its own. Biases, and norms of single
    heads, are left out.
    """
    width, kv_width = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    products = shape.layers * shape.hidden * (2 * width + 2 * kv_width)
    feed_forward = shape.layers * 3 * shape.hidden * shape.ffn
    table = shape.vocab * shape.hidden
    return (
        Part("embedding", table, 0),
        Part(LINEARS[0], products, 2 * products),
        Part("attention's context", 0, 2 * 2 * shape.layers * width * context),
        Part(LINEARS[1], feed_forward, 2 * feed_forward),
        Part("norms", (2 * shape.layers + 1) * shape.hidden, 0),
        Part("head", 0 if shape.tied else table, 2 * table),
    )
