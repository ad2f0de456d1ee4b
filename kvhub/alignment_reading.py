"""The text as both models have it, read as often as an aligned fit asks for."""

from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvhub.alignment_rows import Layer
from kvhub.attention import observe_attention
from kvhub.calibration import content_states
from kvhub.data import TokenBatch
from kvhub.errors import UsageError
from kvhub.mapper_config import MapperConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Reading", "Seen"]

# Target layer, what it sees, source states, and `[batch]` which sequences are held out.
Visit = Callable[[int, Layer, dict[str, Tensor], Tensor], None]


@dataclass(frozen=True)
class Seen:
    """A batch as both models have it.

    Attributes
    ----------
    source
        `[source layers, kv_heads, batch * tokens, head_dim]` content keys and values.
    target
        By target layer.
    held_out
        `[batch]`: which sequences are held out.
    """

    source: dict[str, Tensor]
    target: dict[int, Layer]
    held_out: Tensor

    @property
    def size_bytes(self) -> int:
        tensors = list(self.source.values())
        for layer in self.target.values():
            tensors += [layer.queries, layer.keys, layer.values]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Reading:
    """The text, read by both models as often as it is asked for.

    As many batches as fit into `memory_bytes` are kept from one pass to the next over the same
    layers, so that a short text is run through the models once.
    """

    def __init__(
        self,
        config: MapperConfig,
        source_model: "PreTrainedModel",
        target_model: "PreTrainedModel",
        batches: Iterable[TokenBatch],
        memory_bytes: int,
        held_out_every: int,
        passes: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.config, self.batches = config, batches
        self.source_model, self.target_model = source_model, target_model
        self.held_out_every, self.memory_bytes = held_out_every, memory_bytes
        self.total = passes * len(batches) if isinstance(batches, Sized) else 0
        self.progress, self.done = progress, 0
        self.layers = range(0)
        self.kept: dict[int, Seen] = {}
        self.kept_bytes = 0

    def once(self, layers: range, visit: Visit) -> None:
        """Call `visit(target layer, what it sees, source states, [batch] held out)` for each."""
        if layers != self.layers:
            self.layers, self.kept, self.kept_bytes = layers, {}, 0
        for index, batch in enumerate(self.batches):
            seen = self.kept.get(index) or self._read(batch)
            size = seen.size_bytes
            if index not in self.kept and self.kept_bytes + size <= self.memory_bytes:
                self.kept[index] = seen
                self.kept_bytes += size
            for number, layer in seen.target.items():
                device = seen.source["keys"].device
                chosen = torch.tensor(self.config.selection[number], device=device)
                states = {
                    kind: seen.source[kind].index_select(0, chosen).to(layer.keys.device)
                    for kind in seen.source
                }
                visit(number, layer, states, seen.held_out)
            self.done += 1
            if self.progress is not None:
                self.progress(self.done, self.total)

    def _read(self, batch: TokenBatch) -> Seen:
        device = self.target_model.device
        mask = batch.attention_mask.to(device)
        ids = torch.tensor(batch.sequence_ids, device=device)
        target: dict[int, Layer] = {}

        def observe(
            index: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float
        ) -> None:
            if index in self.layers:
                target[index] = Layer(queries, keys, values, scaling, mask)

        with observe_attention(self.target_model, observe):
            content_states(self.target_model, batch, self.config.target)
        source = content_states(self.source_model, batch, self.config.source)
        return Seen(source, target, ids % self.held_out_every == self.held_out_every - 1)

    def require_both(self, fitted: float, held_out: float, exact_prefix: int) -> None:
        """Raise unless there is text to fit and text held out."""
        if fitted == 0 or held_out == 0:
            raise UsageError(
                f"Nothing to fit or nothing held out: expected both, found {fitted:.0f} and "
                f"{held_out:.0f} rows.",
                f"Give at least {self.held_out_every} sequences of more than {exact_prefix} "
                "tokens.",
            )
