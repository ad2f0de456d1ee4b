"""Run both models over the same tokens, once, and keep only sufficient statistics."""

import time
from collections.abc import Callable, Iterable, Sized
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from kvhub.attention import attention_sensitivity, observe_attention
from kvhub.cache import cache_of, prefill, read_cache
from kvhub.compatibility import require_pair, require_same
from kvhub.data import TokenBatch
from kvhub.errors import ConflictError, UsageError, VerificationError
from kvhub.moments import KINDS, Heads, Moments, group_features
from kvhub.probe import verify_rope
from kvhub.rope import strip_rope
from kvhub.spec import ModelSpec, RopeSpec
from kvhub.stats import Statistics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "calibrate",
    "content_states",
    "effective_weights",
    "reduce_moments",
    "reduce_statistics",
]

HELD_OUT_EVERY = 10  # of the sequences, one
MIN_EFFECTIVE_SHARE = 0.5  # of the tokens that attention weights must leave effective
UNWEIGHTED_TOKENS = 4  # first positions, attention sinks: a hand-off computes them exactly


def calibrate(
    source_model: "PreTrainedModel",
    target_model: "PreTrainedModel",
    token_batches: Iterable[TokenBatch | Tensor],
    *,
    source_spec: ModelSpec | None = None,
    target_spec: ModelSpec | None = None,
    heads: Heads = "all",
    weighting: Literal["uniform", "attention"] = "uniform",
    stride: int = 1,
    held_out_every: int = HELD_OUT_EVERY,
    provenance: dict[str, Any] | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = 300.0,
    progress: Callable[[int, int], None] | None = None,
) -> Statistics:
    """Collect the statistics that selection and every fit need.

    Under `torchrun`, give each rank its own share of the sequences; every rank returns the sum.

    Parameters
    ----------
    source_model, target_model
        Two causal language models of transformers with one tokenizer.
    token_batches
        `TokenBatch`es from `kvhub.data.token_batches`, or plain `[batch, tokens]` int64 ids
        without padding. Sequences are told apart by their ids, or are counted.
    source_spec, target_spec
        The models' specs where they are known with commit and tokenizer; else they are read from
        the models.
    heads
        `all` or `matched`, see `Statistics`.
    weighting
        `uniform`, or `attention`: a token counts by how much the target's attention output feels
        an error in its key or value (see `kvhub.attention.attention_sensitivity`).
    stride
        Use every n-th token of a sequence. The paper uses 4.
    held_out_every
        Every n-th sequence is kept apart for scoring.
    provenance
        Where the tokens came from; it ends in the mapper's config.
    checkpoint
        A file that is written every `checkpoint_seconds`. If it exists already, the sequences in
        it are skipped, so an interrupted calibration goes on where it was.
    progress
        Called with (batches done, batches in all or 0 where unknown).

    Returns
    -------
    statistics
        On the CPU, in float64.

    Raises
    ------
    IncompatiblePairError
        The models do not fit together, are not those of the specs, or rotate their keys in a way
        that their spec does not describe.
    UsageError
        No tokens, or none held out.
    VerificationError
        A cache is not finite.
    ConflictError
        The checkpoint is one of another calibration.
    """
    source_spec = _spec_of(source_model, source_spec, "source")
    target_spec = _spec_of(target_model, target_spec, "target")
    require_pair(source_spec, target_spec, heads)
    verify_rope(source_model, source_spec)
    verify_rope(target_model, target_spec)
    if stride < 1 or held_out_every < 2:
        raise UsageError(
            f"stride must be at least 1 and held_out_every at least 2; found {stride} and "
            f"{held_out_every}."
        )
    settings = {"stride": stride, "held_out_every": held_out_every}
    statistics = Statistics.empty(
        source_spec,
        target_spec,
        heads,
        weighting,
        {**(provenance or {}), **settings, "sequences": 0, "held_out_sequences": 0},
        device=target_model.device,
    )
    next_sequence = 0
    checkpoint = None if checkpoint is None else _rank_path(Path(checkpoint))
    if checkpoint is not None and checkpoint.is_file():
        statistics, next_sequence = _resume(checkpoint, statistics)
    saved = time.monotonic()
    counted = 0
    total = len(token_batches) if isinstance(token_batches, Sized) else 0
    for done, batch in enumerate(token_batches, start=1):
        if isinstance(batch, Tensor):
            ids = tuple(range(counted, counted + len(batch)))
            batch = TokenBatch(batch, torch.ones_like(batch), ids)
        counted += len(batch.sequence_ids)
        if max(batch.sequence_ids) >= next_sequence:
            _add(statistics, source_model, target_model, batch, stride, held_out_every)
            if checkpoint is not None and time.monotonic() - saved > checkpoint_seconds:
                statistics.provenance["next_sequence"] = max(batch.sequence_ids) + 1
                statistics.save(checkpoint)
                saved = time.monotonic()
        if progress is not None:
            progress(done, total)
    statistics.provenance.pop("next_sequence", None)
    statistics = reduce_statistics(statistics)
    if statistics.tokens == 0 or statistics.held_out["keys"].tokens == 0:
        raise UsageError(
            f"{statistics.provenance['sequences']} sequences leave {statistics.tokens} tokens to "
            f"fit and {statistics.held_out['keys'].tokens} held out; both must be above 0.",
            f"Give at least {held_out_every} sequences.",
        )
    return statistics


def _spec_of(model: "PreTrainedModel", spec: ModelSpec | None, role: str) -> ModelSpec:
    found = ModelSpec.from_model(model)
    if spec is None:
        return found
    require_same(spec, found, role)
    return spec


def _add(
    statistics: Statistics,
    source_model: "PreTrainedModel",
    target_model: "PreTrainedModel",
    batch: TokenBatch,
    stride: int,
    held_out_every: int,
) -> None:
    """Add one batch: forward both models, strip RoPE, drop padding, update the moments."""
    mask = batch.attention_mask
    vocabulary = min(statistics.source.vocab_size, statistics.target.vocab_size)
    if not 0 <= int(batch.input_ids.min()) <= int(batch.input_ids.max()) < vocabulary:
        raise UsageError(
            f"Token ids must be below the smaller vocabulary, {vocabulary}; found "
            f"{int(batch.input_ids.min())} to {int(batch.input_ids.max())}.",
            "Tokenize with the tokenizer of the pair.",
        )
    source = content_states(source_model, batch, statistics.source)
    weights: dict[str, Tensor] | None = None
    if statistics.weighting == "attention":
        target, weights = _weighted_states(target_model, batch, statistics)
    else:
        target = content_states(target_model, batch, statistics.target)

    # Which tokens to use: staggered by sequence, so that a stride sees every position.
    ids = torch.tensor(batch.sequence_ids)
    positions = torch.arange(mask.shape[1])
    used = mask.bool() & ((positions + ids[:, None]) % stride == 0)
    held_out = ids % held_out_every == held_out_every - 1
    for part, rows in (("fitted", ~held_out), ("held_out", held_out)):
        chosen = (used & rows[:, None]).flatten().nonzero()[:, 0]
        if len(chosen) == 0:
            continue
        for kind in KINDS:
            moments: Moments = getattr(statistics, part)[kind]
            index = chosen.to(moments.gram.device)
            moments.update(
                group_features(
                    source[kind].to(index.device).index_select(2, index), statistics.heads
                ),
                group_features(
                    target[kind].to(index.device).index_select(2, index), statistics.heads
                ),
                None if weights is None else weights[kind].to(index.device)[index],
            )
    statistics.provenance["sequences"] += len(ids)
    statistics.provenance["held_out_sequences"] += int(held_out.sum())


def content_states(
    model: "PreTrainedModel", batch: TokenBatch, spec: ModelSpec
) -> dict[str, Tensor]:
    """Content keys and values `[layers, kv_heads, batch * tokens, head_dim]` in float32."""
    device = model.device
    mask = batch.attention_mask.to(device)
    output = prefill(model, batch.input_ids.to(device), attention_mask=mask, logits_to_keep=1)
    keys, values = read_cache(cache_of(output), spec)
    positions = torch.arange(mask.shape[1], device=device)

    def flat(layers: list[Tensor], rope: RopeSpec | None) -> Tensor:
        states = torch.stack(layers)
        if not bool(torch.isfinite(states.masked_fill(~mask.bool()[:, None, :, None], 0)).all()):
            raise VerificationError(
                f"The cache of {spec.model_id} is not finite in dtype {states.dtype}.",
                "Load the model in bfloat16 or float32: --dtype float32.",
            )
        states = states.float() if rope is None else strip_rope(states, positions, rope)
        return states.transpose(1, 2).flatten(2, 3)

    return {"keys": flat(keys, spec.require_rope()), "values": flat(values, None)}


def _weighted_states(
    model: "PreTrainedModel", batch: TokenBatch, statistics: Statistics
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The target's states, and weights `[batch * tokens, groups]` for keys and values."""
    mask = batch.attention_mask.to(model.device)
    rows, tokens = mask.shape
    spec = statistics.target
    sums = {kind: torch.zeros(rows, spec.kv_heads, tokens, device=mask.device) for kind in KINDS}

    def watch(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        found = attention_sensitivity(queries, keys, values, scaling, mask)
        for kind, sensitivity in zip(KINDS, found, strict=True):
            # Each layer counts alike in each sequence, whatever the size of its values.
            sums[kind] += sensitivity / sensitivity.sum((1, 2), keepdim=True).clamp(min=1e-30)

    with observe_attention(model, watch):
        states = content_states(model, batch, spec)
    weights = {}
    for kind, total in sums.items():
        grouped = total.mean(1, keepdim=True) if statistics.heads == "all" else total
        weights[kind] = effective_weights(grouped, mask).permute(0, 2, 1).flatten(0, 1)
    return states, weights


def effective_weights(sensitivity: Tensor, mask: Tensor) -> Tensor:
    """Turn sensitivities into weights of mean 1 that leave enough tokens effective.

    The first `UNWEIGHTED_TOKENS` tokens get weight 1. The rest is blended with uniform weights,
    u = 1 - m + m w, with the largest m <= 1 for which Kish's effective sample size
    (sum u)^2 / sum u^2 = n / (1 + m^2 var(w)) stays above half of the n tokens.

    Parameters
    ----------
    sensitivity
        `[batch, groups, tokens]`, not negative.
    mask
        `[batch, tokens]`, 0 on padding.

    Returns
    -------
    weights
        `[batch, groups, tokens]`, 0 on padding.
    """
    real = mask[:, None].to(sensitivity)
    weighted = real.clone()
    weighted[..., :UNWEIGHTED_TOKENS] = 0
    count = weighted.sum(-1, keepdim=True).clamp(min=1)
    mean = (sensitivity * weighted).sum(-1, keepdim=True) / count
    relative = sensitivity / mean.clamp(min=1e-30)
    variance = ((relative - 1) ** 2 * weighted).sum(-1, keepdim=True) / count
    most = ((1 / MIN_EFFECTIVE_SHARE - 1) / variance.clamp(min=1e-30)).sqrt().clamp(max=1)
    return torch.where(weighted > 0, 1 - most + most * relative, 1.0) * real


def reduce_statistics(statistics: Statistics) -> Statistics:
    """Sum over the ranks of a `torch.distributed` group; without one, only move to the CPU.

    Every rank's moments are taken about the common mean and then summed, which is the merge of
    `Moments` for many at once.
    """
    if is_distributed() and torch.distributed.get_world_size() > 1:
        provenance = dict(statistics.provenance)
        for name in ("sequences", "held_out_sequences"):
            count = torch.tensor(provenance[name])
            torch.distributed.all_reduce(count)
            provenance[name] = int(count)
        statistics = replace(statistics, provenance=provenance)
        for part in (statistics.fitted, statistics.held_out):
            for moments in part.values():
                reduce_moments(moments)
    for part in (statistics.fitted, statistics.held_out):
        for kind, moments in part.items():
            part[kind] = moments.to("cpu")
    return statistics


def is_distributed() -> bool:
    """Whether this process is a rank of a `torch.distributed` group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The tensor, summed in place over the ranks of the process group if there is one."""
    if is_distributed():
        torch.distributed.all_reduce(tensor)
    return tensor


def reduce_moments(moments: Moments) -> None:
    """Sum moments over the ranks of the process group, in place; without one, do nothing."""
    if not is_distributed():
        return
    summed = sum_over_ranks
    own = moments.weight.clone()
    total = summed(moments.weight.clone())
    share = (own / total.clamp(min=1e-300))[:, None]
    source_mean = summed(share * moments.source_mean)
    target_mean = summed(share * moments.target_mean)
    root = own.sqrt()[:, None]
    x_shift = root * (moments.source_mean - source_mean)
    y_shift = root * (moments.target_mean - target_mean)
    moments.gram.baddbmm_(x_shift[:, :, None], x_shift[:, None])
    moments.cross.baddbmm_(x_shift[:, :, None], y_shift[:, None])
    moments.target_square += y_shift**2
    for tensor in (moments.gram, moments.cross, moments.target_square, moments.weight_square):
        summed(tensor)
    moments.weight, moments.source_mean, moments.target_mean = total, source_mean, target_mean
    moments.tokens = int(summed(torch.tensor(moments.tokens)))


def _rank_path(path: Path) -> Path:
    if is_distributed():
        return path.with_name(f"{path.name}.rank{torch.distributed.get_rank()}")
    return path


def _resume(checkpoint: Path, fresh: Statistics) -> tuple[Statistics, int]:
    """The statistics in a checkpoint, if it is one of this calibration."""
    found = Statistics.load(checkpoint)

    def identity(statistics: Statistics) -> list[Any]:
        counts = ("sequences", "held_out_sequences", "next_sequence")
        settings = {k: v for k, v in statistics.provenance.items() if k not in counts}
        return [
            statistics.source,
            statistics.target,
            statistics.heads,
            statistics.weighting,
            settings,
        ]

    if identity(found) != identity(fresh):
        raise ConflictError(
            f"{checkpoint} belongs to another calibration: {found.source.model_id} to "
            f"{found.target.model_id}, heads {found.heads}, {found.provenance}; this one is "
            f"{fresh.source.model_id} to {fresh.target.model_id}, heads {fresh.heads}, "
            f"{fresh.provenance}.",
            "Delete the file to start over.",
        )
    device = fresh.fitted["keys"].gram.device
    for part in (found.fitted, found.held_out):
        for kind, moments in part.items():
            part[kind] = moments.to(device)
    return found, found.provenance["next_sequence"]
