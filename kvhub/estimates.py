"""What a mapper would weigh, cost and save, from two specs alone."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvhub.compatibility import Heads
from kvhub.roofline import DEVICES, H100_SXM, Prediction, map_weights, predict
from kvhub.spec import ModelSpec

__all__ = ["Estimate", "estimate"]

LENGTHS = (1024, 8192, 32768)  # contexts in tokens


@dataclass(frozen=True)
class Estimate:
    """Sizes, operations, and predicted times; nothing here is measured.

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
    predictions
        Times of the map and of the target's prefill, for each device of `kvhub.roofline` and each
        context length.
    """

    heads: Heads
    top_k: int
    parameters: int
    size_bytes: int
    features: int
    statistics_bytes: int
    map_flops: int
    predictions: tuple[Prediction, ...]

    @property
    def gain(self) -> dict[int, float]:
        """How much faster than prefilling an H100 maps, by context length; see `Prediction`."""
        return {p.tokens: p.gain for p in self.predictions if p.device == H100_SXM.name}

    def to_dict(self) -> dict[str, Any]:
        predictions = [prediction.to_dict() for prediction in self.predictions]
        return {**asdict(self), "predictions": predictions, "gain": self.gain}


def estimate(
    source: ModelSpec,
    target: ModelSpec,
    heads: Heads,
    top_k: int,
    target_parameters: int,
    lengths: Sequence[int] = LENGTHS,
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
        Of contexts, in tokens.

    Raises
    ------
    UsageError
        `top_k` is below 1.
    """
    top_k = min(top_k, source.num_layers)
    groups = 1 if heads == "all" else target.kv_heads
    features = top_k * source.kv_dim // groups
    weights = map_weights(source, target, heads, top_k)
    columns = source.num_layers * source.kv_dim + target.num_layers * target.kv_dim
    moments = source.num_layers * source.kv_dim * columns // groups
    # Embeddings are looked up, not multiplied. Where the output has its own, those stay in,
    # although only the last token needs them.
    multiplied = target_parameters - target.vocab_size * target.hidden_size
    parameters = weights + 2 * target.num_layers * target.kv_dim
    return Estimate(
        heads=heads,
        top_k=top_k,
        parameters=parameters,
        size_bytes=2 * parameters,
        features=features,
        statistics_bytes=2 * 2 * 8 * moments,
        map_flops=2 * weights,
        predictions=tuple(
            predict(source, target, heads, top_k, multiplied, tokens, device)
            for device in DEVICES
            for tokens in lengths
        ),
    )
