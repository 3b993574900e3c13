"""A small GPT: predicts the next token (the next byte) of a text from those before it.

Decoder-only transformer with the normalisation before each part, as in Radford et al. (GPT-2, 2019) and Xiong et al.,
"On layer normalization in the transformer architecture", ICML 2020: embedding, `depth` blocks of attention and a
two-layer perceptron, each with a residual path around it, a last normalisation, and a linear head. Parameters: about
12 depth width^2 + 2 vocabulary width; arithmetic: six operations per parameter and token, and attention.

Each block is one layer of the `Model`: the unit that ZeRO stage 3 gathers.
"""

from __future__ import annotations

import math

from hpczero.errors import ConfigError
from hpczero.models.attention import CausalAttention
from hpczero.models.chain import Chain, Residual
from hpczero.models.embedding import Embedding
from hpczero.models.gelu import Gelu
from hpczero.models.layer_norm import LayerNorm
from hpczero.models.linear import Linear
from hpczero.models.losses import cross_entropy
from hpczero.models.model import Model


def build(*, vocabulary: int, sequence_length: int, width: int, depth: int, heads: int) -> Model:
    """(sequences, length) token numbers -> (sequences, length, vocabulary) scores for the token that follows each.

    Parameters
    ----------
    vocabulary : int
        Number of different tokens: 256 for bytes.
    sequence_length : int
        The longest sequence; shorter ones are taken too.
    width, depth, heads : int
        Size of the vector per token, number of blocks, attention heads per block (a divisor of width).

    Raises
    ------
    ConfigError
        A size below 1, or heads that do not divide the width.
    """
    sizes = {
        "vocabulary": vocabulary, "sequence_length": sequence_length, "width": width, "depth": depth, "heads": heads
    }
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"transformer: {name} is {value}; at least 1 is needed")
    if width % heads:
        nearest = min((n for n in range(1, width + 1) if width % n == 0), key=lambda n: abs(n - heads))
        raise ConfigError(f"transformer: {heads} heads do not divide the width {width}; the nearest that do: {nearest}")
    # The blocks add 2 depth terms to the residual stream; so scaled, their sum does not grow with the depth (GPT-2).
    gain = 1 / math.sqrt(2 * depth)
    blocks = [(f"block{i}", _block(width, heads, gain)) for i in range(depth)]
    return Model(
        (
            ("embedding", Embedding(vocabulary, sequence_length, width, std=0.2)),
            *blocks,
            ("norm", LayerNorm(width)),
            ("head", Linear(width, vocabulary)),
        ),
        cross_entropy,
    )


def _block(width: int, heads: int, gain: float) -> Chain:
    """One block; `gain` scales the first values of the layers whose output enters the residual stream."""
    return Chain(
        attention=Residual(
            Chain(
                norm=LayerNorm(width),
                qkv=Linear(width, 3 * width),
                heads=CausalAttention(heads),
                out=Linear(width, width, gain),
            )
        ),
        mlp=Residual(
            Chain(
                norm=LayerNorm(width),
                up=Linear(width, 4 * width),
                gelu=Gelu(),
                down=Linear(4 * width, width, gain),
            )
        ),
    )
