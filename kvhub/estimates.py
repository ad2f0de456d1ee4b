"""What a mapper would weigh and save, from two specs alone."""

from dataclasses import asdict, dataclass
from typing import Any

from kvhub.compatibility import Heads
from kvhub.spec import ModelSpec

__all__ = ["Estimate", "estimate"]


@dataclass(frozen=True)
class Estimate:
    """Sizes and floating-point operations; no time of any machine.

    Attributes
    ----------
    parameters
        Weights and biases of the mapper.
    size_bytes
        In 16-bit.
    features
        Per regression: calibration needs more tokens than that, better ten times as many.
    statistics_bytes
        What calibration keeps in memory, fitted and held-out moments in float64.
    map_flops
        Per token.
    prefill_flops
        Per token of the target's prefill, by context length: twice its weights, and causal
        attention over half the context on average.
    """

    heads: Heads
    top_k: int
    parameters: int
    size_bytes: int
    features: int
    statistics_bytes: int
    map_flops: int
    prefill_flops: dict[int, int]

    @property
    def gain(self) -> dict[int, float]:
        """Prefill over map operations, by context length: the gain where both are compute bound."""
        return {tokens: flops / self.map_flops for tokens, flops in self.prefill_flops.items()}

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gain": self.gain}


def estimate(
    source: ModelSpec,
    target: ModelSpec,
    heads: Heads,
    top_k: int,
    target_parameters: int,
    lengths: tuple[int, ...] = (1024, 8192, 32768),
) -> Estimate:
    """Estimate a mapper of a pair.

    Parameters
    ----------
    source, target
        The specs.
    heads, top_k
        Of the mapper; `top_k` is cut to the source's layers.
    target_parameters
        Weights of the target, from `kvhub.models.count_parameters`.
    lengths
        Context lengths in tokens.
    """
    top_k = min(top_k, source.num_layers)
    groups = 1 if heads == "all" else target.kv_heads
    features = top_k * source.kv_dim // groups
    weights = 2 * target.num_layers * features * target.kv_dim
    columns = source.num_layers * source.kv_dim + target.num_layers * target.kv_dim
    moments = source.num_layers * source.kv_dim * columns // groups
    attention = 4 * target.num_layers * target.attention_heads * target.head_dim
    parameters = weights + 2 * target.num_layers * target.kv_dim
    return Estimate(
        heads=heads,
        top_k=top_k,
        parameters=parameters,
        size_bytes=2 * parameters,
        features=features,
        statistics_bytes=2 * 2 * 8 * moments,
        map_flops=2 * weights,
        prefill_flops={n: 2 * target_parameters + attention * n // 2 for n in lengths},
    )
