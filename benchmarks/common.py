"""What the benchmarks share: a result, interleaved timing, and the pairs they measure on."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvhub import MapperConfig, ModelSpec

SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
}


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes
    ----------
    name
        What was measured.
    expected
        What its author expected before measuring.
    found
        For people: times, and the ratio where there is one.
    value, limit
        The number that counts, and what it must not exceed; a limit of None is information only.
    unit
        `x` of a ratio, or `s`.
    """

    name: str
    expected: str
    found: str
    value: float
    limit: float | None
    unit: str = "x"

    @property
    def passed(self) -> bool:
        return self.limit is None or self.value <= self.limit


@dataclass(frozen=True)
class Comparison:
    """The best times in seconds of two functions."""

    measured: float
    reference: float

    @property
    def ratio(self) -> float:
        return self.measured / self.reference

    def __str__(self) -> str:
        return f"{duration(self.measured)} against {duration(self.reference)}"


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def compare(
    measured: Callable[[], object],
    reference: Callable[[], object],
    repeats: int,
    warmup: bool = True,
) -> Comparison:
    """Run the two in turn, so that whatever else the machine does meets both alike.

    The best of the runs counts: what is slower than that was somebody else's doing.
    """
    if warmup:
        measured()
        reference()
    times = [(seconds(measured), seconds(reference)) for _ in range(repeats)]
    return Comparison(min(a for a, _ in times), min(b for _, b in times))


def smollm2_pair() -> tuple[ModelSpec, ModelSpec]:
    """SmolLM2-135M as the target, the same without four layers as the source."""
    source = ModelSpec.from_config({**SMOLLM2, "num_hidden_layers": 26}, "smollm2-26-layers")
    return source, ModelSpec.from_config(SMOLLM2, "smollm2")


def qwen3_pair(target_layers: int = 28) -> tuple[ModelSpec, ModelSpec]:
    """Qwen3-0.6B to 1.7B; the target may be cut short where all of it would take too long."""
    small = {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072}
    large = {**QWEN3, "hidden_size": 2048, "intermediate_size": 6144}
    target = ModelSpec.from_config({**large, "num_hidden_layers": target_layers}, "qwen3-1.7b")
    return ModelSpec.from_config(small, "qwen3-0.6b"), target


def mapper_config(source: ModelSpec, target: ModelSpec, heads: str, top_k: int) -> MapperConfig:
    """A config whose target layers read the source layers around their own relative depth."""
    selection = []
    for layer in range(target.num_layers):
        middle = layer * source.num_layers / target.num_layers
        near = sorted(range(source.num_layers), key=lambda index: abs(index - middle))
        selection.append(tuple(near[:top_k]))
    return MapperConfig(
        source=source,
        target=target,
        heads=heads,
        top_k=top_k,
        selection=tuple(selection),
        selection_method="probe",
        ridge={},
        weighting="uniform",
    )
