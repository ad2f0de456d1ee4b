"""How well a target continues from a mapped cache, always beside what it is compared with.

Of a sequence of L tokens the first P = int(prefix_fraction * L) are the prefix. The same tokens
P + 1 .. L - 1 are predicted, each from its true predecessors, in four settings:

    target_alone   the target has read everything
    source_alone   the source has read everything
    mapped         the source has read the prefix, the target goes on from its mapped cache
    no_context     the target has read only the tokens from P on

The mapped setting keeps the first `exact_prefix` tokens exact, as a hand-off does. R2, cosine,
placement and error by position are those of the map alone. For each of `exact_budgets` the mapped
setting is run once more, with as many exact tokens, chosen as for a hand-off.
"""

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvhub.attention import observe_attention
from kvhub.bootstrap import RESAMPLES, SEED, Bootstrap
from kvhub.cache import cache_of, crop_cache, prefill, read_cache
from kvhub.compatibility import require_same
from kvhub.errors import UsageError
from kvhub.exact import EXACT_PREFIX, choose_exact, predicted_damage
from kvhub.fidelity import FidelityMeter
from kvhub.generation import prefill_mapped
from kvhub.metrics import (
    attention_output_cosine,
    exact_curve,
    floor_normalized_retention,
    gap_recovered,
    retention,
    score_predictions,
    setting_metrics,
    sums_table,
)
from kvhub.report import SETTINGS, Report
from kvhub.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import Cache, DynamicCache, PreTrainedModel

    from kvhub.data import TokenBatch
    from kvhub.mapper import KVMapper

__all__ = ["Report", "evaluate"]

FEW_SEQUENCES = 20  # below which a percentile interval is known to be too narrow


def evaluate(
    mapper: "KVMapper",
    source_model: "PreTrainedModel",
    target_model: "PreTrainedModel",
    token_batches: "Iterable[TokenBatch | Tensor]",
    *,
    prefix_fraction: float = 0.75,
    exact_prefix: int = EXACT_PREFIX,
    exact_budgets: Sequence[int] = (),
    provenance: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Evaluate a mapper on text that it was not fitted on.

    Parameters
    ----------
    mapper
        Fitted for these two models.
    source_model, target_model
        In eval mode; they and the mapper may be on different devices.
    token_batches
        `TokenBatch`es from `kvhub.data.token_batches`, or plain `[batch, tokens]` int64 ids
        without padding. Sequences of one length are run together, without their padding. One
        batch is held in memory at a time.
    prefix_fraction
        Share of a sequence that is mapped, above 0 and below 1.
    exact_prefix
        Tokens at the start that the target computes itself in the mapped setting.
    exact_budgets
        For the report's curve of fidelity against recompute, in tokens per sequence; each takes
        two more passes of the target, and all of them one of the source.
    provenance
        JSON-able: which mapper and which data; it ends in the report.
    progress
        Called with (batches done, batches in all or 0 where unknown).

    Returns
    -------
    report
        Intervals are 95 % percentile bootstrap over sequences.

    Raises
    ------
    UsageError
        A parameter out of range, token ids beyond the vocabulary, or no sequence long enough.
    IncompatiblePairError
        The mapper was fitted for other models.
    VerificationError
        A cache or a figure is not finite.
    """
    if not 0 < prefix_fraction < 1 or exact_prefix < 0:
        raise UsageError(
            "prefix_fraction must lie between 0 and 1 and exact_prefix must not be negative; "
            f"found {prefix_fraction} and {exact_prefix}."
        )
    if any(budget < 0 for budget in exact_budgets):
        raise UsageError(f"exact_budgets must not be negative; found {list(exact_budgets)}.")
    require_same(mapper.config.source, ModelSpec.from_model(source_model), "source")
    require_same(mapper.config.target, ModelSpec.from_model(target_model), "target")
    evaluation = _Evaluation(
        mapper, source_model, target_model, prefix_fraction, exact_prefix, exact_budgets
    )
    total = len(token_batches) if isinstance(token_batches, Sized) else 0
    for done, batch in enumerate(token_batches, start=1):
        evaluation.add(batch)
        if progress is not None:
            progress(done, total)
    return evaluation.report(provenance or {})


class _Evaluation:
    """The sums of a running evaluation."""

    def __init__(
        self,
        mapper: "KVMapper",
        source_model: "PreTrainedModel",
        target_model: "PreTrainedModel",
        prefix_fraction: float,
        exact_prefix: int,
        exact_budgets: Sequence[int],
    ) -> None:
        self.mapper, self.source, self.target = mapper, source_model, target_model
        self.prefix_fraction, self.exact_prefix = prefix_fraction, exact_prefix
        # By budget, in tokens of all sequences.
        self.exact_tokens = dict.fromkeys(sorted(exact_budgets), 0)
        self.meter = FidelityMeter(mapper.config.target)
        self.rows: list[Tensor] = []  # one per sequence, see sums_table
        self.prefix_tokens = 0
        self.skipped = 0

    def add(self, batch: "TokenBatch | Tensor") -> None:
        ids = batch if isinstance(batch, Tensor) else batch.input_ids
        mask = torch.ones_like(ids) if isinstance(batch, Tensor) else batch.attention_mask
        found: dict[int, Tensor] = {}
        for index, sequences in _by_length(ids, mask):
            length = sequences.shape[1]
            prefix = int(self.prefix_fraction * length)
            # At least one token to map and one to score.
            if prefix <= self.exact_prefix or length - 1 - prefix < 1:
                self.skipped += len(sequences)
                continue
            self._require_ids(sequences)
            rows = self._score(sequences, prefix)
            self.prefix_tokens += prefix * len(sequences)
            found.update(zip(index, rows, strict=True))
        # In the order of the batch, so that the resamples do not depend on the padding.
        self.rows.extend(found[index] for index in sorted(found))

    def _require_ids(self, sequences: Tensor) -> None:
        config = self.mapper.config
        vocabulary = min(config.source.vocab_size, config.target.vocab_size)
        low, high = int(sequences.min()), int(sequences.max())
        if low < 0 or high >= vocabulary:
            raise UsageError(
                f"Token ids must be below the smaller vocabulary, {vocabulary}; found {low} to "
                f"{high}.",
                "Tokenize with the tokenizer of the pair.",
            )

    def _score(self, sequences: Tensor, prefix: int) -> Tensor:
        """Run all settings over `[batch, length]` ids of equal length; rows of `sums_table`."""
        inputs, labels = sequences[:, :-1], sequences[:, prefix + 1 :]
        scored = labels.shape[1]
        output = prefill(self.source, inputs.to(self.source.device), logits_to_keep=scored)
        source_cache = crop_cache(cache_of(output), 0, prefix)
        source_logits = output.logits[:, -scored:]
        del output
        reference, cosine = self._target_alone(sequences, prefix, source_cache)
        scores = {
            "target_alone": score_predictions(reference, reference, labels),
            "source_alone": score_predictions(source_logits, reference, labels),
        }
        del source_logits
        later = inputs[:, prefix:].to(self.target.device)
        cache = self._mapped_cache(sequences, prefix, source_cache, self.exact_prefix)
        for name, start in (("mapped", cache), ("no_context", None)):
            logits = prefill(self.target, later, cache=start).logits
            scores[name] = score_predictions(logits, reference, labels)
        exact = []
        for cache in self._exact_caches(sequences, prefix, source_cache):
            logits = prefill(self.target, later, cache=cache).logits
            exact.append(score_predictions(logits, reference, labels))
        return sums_table(scored, cosine, scores, exact)

    def _exact_caches(
        self, sequences: Tensor, prefix: int, source_cache: "Cache"
    ) -> "Iterator[DynamicCache]":
        """The mapped cache with each budget of exact tokens."""
        if not self.exact_tokens:
            return
        damage, _ = predicted_damage(self.source, sequences[:, :prefix])
        for budget in self.exact_tokens:
            regions = choose_exact(damage, budget)
            self.exact_tokens[budget] += len(sequences) * min(budget, prefix)
            yield self._mapped_cache(
                sequences, prefix, source_cache, regions.prefix, regions.positions
            )

    def _target_alone(
        self, sequences: Tensor, prefix: int, source_cache: "Cache"
    ) -> tuple[Tensor, Tensor]:
        """Scored logits of target-alone, and `[batch]` cosines; the map alone is metered."""
        cache = self._mapped_cache(sequences, prefix, source_cache, exact_prefix=0)
        mapped_keys, mapped_values = read_cache(cache, self.mapper.config.target)
        cosine = torch.zeros(len(sequences), dtype=torch.float64)

        def compare(
            layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float
        ) -> None:
            mapped = mapped_keys[layer], mapped_values[layer]
            cosine.add_(self.meter.update(layer, queries, keys, values, *mapped, scaling))

        scored = sequences.shape[1] - 1 - prefix
        with observe_attention(self.target, compare):
            inputs = sequences[:, :-1].to(self.target.device)
            logits = prefill(self.target, inputs, logits_to_keep=scored).logits[:, -scored:]
        return logits, cosine / len(mapped_keys)

    def _mapped_cache(
        self,
        sequences: Tensor,
        prefix: int,
        source_cache: "Cache",
        exact_prefix: int,
        exact_positions: Tensor | None = None,
    ) -> "DynamicCache":
        # One token more than the prefix: prefill_mapped leaves the last one to its caller.
        return prefill_mapped(
            self.mapper,
            self.source,
            self.target,
            sequences[:, : prefix + 1],
            exact_prefix=exact_prefix,
            exact_suffix=1,
            exact_positions=exact_positions,
            source_cache=source_cache,
        )

    def report(self, provenance: Mapping[str, Any]) -> Report:
        if not self.rows:
            raise UsageError(
                f"No sequence is long enough: all {self.skipped} leave no token to map after the "
                f"exact prefix of {self.exact_prefix}, or none to score.",
                "Give longer sequences.",
            )
        table = torch.stack(self.rows)
        bootstrap = Bootstrap(table)
        fidelity = self.meter.result()
        notes = []
        if self.skipped:
            notes.append(f"{self.skipped} sequences were too short and are left out.")
        if len(self.rows) < FEW_SEQUENCES:
            notes.append(
                f"{len(self.rows)} sequences are few: intervals over fewer than {FEW_SEQUENCES} "
                "come out too narrow."
            )
        return Report(
            settings={name: setting_metrics(bootstrap, name) for name in SETTINGS},
            retention=retention(bootstrap, notes),
            floor_normalized_retention=floor_normalized_retention(bootstrap, notes),
            gap_recovered=gap_recovered(bootstrap, notes),
            key_r2=_mean(fidelity.key_r2),
            value_r2=_mean(fidelity.value_r2),
            attention_output_cosine=attention_output_cosine(bootstrap),
            layers=fidelity,
            notes=tuple(notes),
            provenance={**provenance, **self._provenance(int(table[:, 0].sum()))},
            exact=exact_curve(
                bootstrap,
                {budget: n / self.prefix_tokens for budget, n in self.exact_tokens.items()},
            ),
        )

    def _provenance(self, scored_tokens: int) -> dict[str, Any]:
        import transformers

        from kvhub import __version__

        config = self.mapper.config
        models = {
            role: {
                "model_id": spec.model_id,
                "revision": spec.revision,
                "dtype": str(model.dtype).removeprefix("torch."),
                "device": model.device.type,
            }
            for role, spec, model in (
                ("source", config.source, self.source),
                ("target", config.target, self.target),
            )
        }
        return {
            **models,
            "heads": config.heads,
            "top_k": config.top_k,
            "sequences": len(self.rows),
            "skipped_sequences": self.skipped,
            "prefix_tokens": self.prefix_tokens,
            "scored_tokens": scored_tokens,
            "protocol": {
                "prefix_fraction": self.prefix_fraction,
                "exact_prefix": self.exact_prefix,
                "mapped_setting": "exact prefix by the target, the rest of the prefix mapped",
                "fidelity": "the map alone, without the exact prefix",
                "intervals": "95 % percentile bootstrap over sequences",
                "resamples": RESAMPLES,
                "seed": SEED,
            },
            "versions": {
                "kvhub": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
        }


def _by_length(ids: Tensor, mask: Tensor) -> Iterator[tuple[list[int], Tensor]]:
    """Rows of equal length, padding cut off: their indices and ids `[rows, length]`."""
    ids, mask = ids.cpu(), mask.cpu().bool()
    lengths = mask.sum(1)
    for length in sorted(set(lengths.tolist())):
        rows = (lengths == length).nonzero()[:, 0]
        yield rows.tolist(), ids[rows][mask[rows]].view(len(rows), length)


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)
