"""Repair a mapper with small networks, only on the target layers where they pay.

The paper replaces the linear map by networks, one per target layer, head and kind, which brings
back its two failing pairs (attention-output cosine +0.4) and makes the mapper as large as the
target. Here the linear map stays, and networks of what it leaves over compete for a size budget:

1. the attention-output cosine of every target layer under the linear map, on held-out sequences;
2. networks for the keys and the values of the worst layers, twice as many as the budget holds;
3. the cosines of these layers with either or both; what gains most per byte is kept.

A layer's cosine is that of its attention over mapped keys and values with the target's own
queries, as in `kvhub.fidelity`, so layers do not wait for each other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvhub.attention import observe_attention
from kvhub.cache import prefill
from kvhub.calibration import content_states
from kvhub.compatibility import require_same
from kvhub.data import TokenBatch
from kvhub.errors import UsageError
from kvhub.fidelity import FidelityMeter
from kvhub.generation import EXACT_PREFIX
from kvhub.mapper import KVMapper
from kvhub.mapper_config import Repair, tensor_shapes
from kvhub.mlp_training import Task, batches_of, train
from kvhub.rope import apply_rope
from kvhub.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["HIDDEN", "SIZE_BUDGET", "LayerGain", "repair"]

HIDDEN = 256  # the paper has 1,024 per head
SIZE_BUDGET = 0.5  # of the mapper's own bytes
MARGIN = 0.002  # of cosine that a network must gain: less is within the noise of few sequences
PREFIX_FRACTION = 0.75  # of a sequence is mapped and the rest asks, as in an evaluation


@dataclass(frozen=True)
class LayerGain:
    """Held-out attention-output cosines of a target layer, and which networks were kept.

    Attributes
    ----------
    layer
        Target layer.
    linear
        With the linear map.
    keys, values, both
        With a network for its keys, its values, or both; what did not train is the linear map.
    kept
        Of `keys` and `values`.
    """

    layer: int
    linear: float
    keys: float
    values: float
    both: float
    kept: tuple[str, ...] = ()


def repair(
    mapper: KVMapper,
    source_model: "PreTrainedModel",
    target_model: "PreTrainedModel",
    token_batches: Iterable[TokenBatch | Tensor],
    *,
    size_budget: float = SIZE_BUDGET,
    hidden: int = HIDDEN,
    held_out_every: int = 10,
    epochs: int = 20,
    buffer_bytes: int = 2 * 2**30,
    provenance: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> KVMapper:
    """Add networks to the layers of a mapper that they help most.

    Parameters
    ----------
    mapper
        A linear one, fitted for these two models. Left as it is; the result shares its tensors.
    source_model, target_model
        In eval mode.
    token_batches
        `TokenBatch`es, or `[batch, tokens]` int64 ids without padding. The ids are kept, the
        states of at most `buffer_bytes` at a time. Best those that the linear map was fitted on:
        then the same sequences are held out.
    size_budget
        Bytes that networks may add, over the mapper's own.
    hidden
        Width of a network's two hidden layers.
    held_out_every
        Every n-th sequence decides when training stops, and what is kept.
    epochs
        At most so many passes over the other sequences.
    buffer_bytes
        See `kvhub.mlp_training.train`.
    provenance
        Where the tokens came from; it ends in the mapper's config.
    progress
        Called with (epochs done, epochs in all).

    Returns
    -------
    mapper
        `config.repair` says which layers have networks, and is None where none pays.
        `config.quality["repair"]` holds the cosines that decided, so they flatter the result a
        little: evaluate it on other text.

    Raises
    ------
    UsageError
        The budget holds no network, the mapper is repaired already, a parameter is out of range,
        or there are too few sequences or wrong ids.
    IncompatiblePairError
        The mapper was fitted for other models.
    VerificationError
        A cache is not finite.
    """
    config = mapper.config
    if config.repair is not None:
        raise UsageError(
            "The mapper has networks already.", "Repair the linear mapper that it was made from."
        )
    if hidden < 1 or held_out_every < 2 or epochs < 1:
        raise UsageError(
            "hidden and epochs must be at least 1 and held_out_every at least 2; found "
            f"{hidden}, {epochs} and {held_out_every}."
        )
    models = source_model, target_model
    for role, model in zip(("source", "target"), models, strict=True):
        require_same(getattr(config, role), ModelSpec.from_model(model), role)
    affordable = _affordable(mapper, hidden, size_budget)
    fitted, held_out = _sequences(config.source, config.target, token_batches, held_out_every)

    every = range(config.target.num_layers)
    linear = _cosines({"linear": (mapper, mapper)}, models, held_out, every)["linear"]
    worst = sorted(sorted(every, key=linear.__getitem__)[:affordable])
    tasks = [Task(kind, layer) for layer in worst for kind in ("key", "value")]
    networks = train(
        mapper,
        models,
        fitted,
        held_out,
        tasks,
        hidden=hidden,
        epochs=epochs,
        buffer_bytes=buffer_bytes,
        progress=progress,
    )
    # What did not train is the linear map.
    found = dict.fromkeys(("keys", "values", "both"), linear)
    if networks:
        trial = _with_networks(mapper, networks, hidden)
        pairs = {"keys": (trial, mapper), "values": (mapper, trial), "both": (trial, trial)}
        found = _cosines(pairs, models, held_out, worst)
    tried = [
        LayerGain(
            layer, linear[layer], found["keys"][layer], found["values"][layer], found["both"][layer]
        )
        for layer in worst
    ]
    gains = choose(tried, affordable)
    kept = {
        Task(kind[:-1], gain.layer): networks[Task(kind[:-1], gain.layer)]
        for gain in gains
        for kind in gain.kept
    }
    record = {
        **(provenance or {}),
        "size_budget": size_budget,
        "hidden": hidden,
        "sequences": len(fitted) + len(held_out),
        "held_out_sequences": len(held_out),
        "layers": [{**asdict(gain), "kept": list(gain.kept)} for gain in gains],
    }
    quality = {**config.quality, "repair": record}
    tensors = mapper.tensors()
    if not kept:
        return KVMapper(replace(config, quality=quality), tensors)
    repaired = _with_networks(mapper, kept, hidden)
    return KVMapper(replace(repaired.config, quality=quality), repaired.tensors())


def choose(gains: Sequence[LayerGain], affordable: int) -> list[LayerGain]:
    """Decide which networks to keep; all have one size, so that gain per byte is gain per network.

    A layer's better network comes before its other one, and both come together where they gain
    more each than the better one does alone.
    """
    steps: list[tuple[float, int, tuple[str, ...]]] = []
    for number, gain in enumerate(gains):
        better = max(("keys", "values"), key=lambda kind: getattr(gain, kind))
        alone, both = getattr(gain, better) - gain.linear, gain.both - gain.linear
        if both / 2 > alone:
            steps.append((both / 2, number, ("keys", "values")))
        else:
            other = "values" if better == "keys" else "keys"
            steps += [(alone, number, (better,)), (both - alone, number, (other,))]
    kept: dict[int, tuple[str, ...]] = {}
    # Of a layer with two steps the first gains at least as much, so it is taken first.
    for each, number, kinds in sorted(steps, key=lambda step: -step[0]):
        if each > MARGIN and len(kinds) <= affordable:
            kept[number] = tuple(sorted((*kept.get(number, ()), *kinds)))
            affordable -= len(kinds)
    return [replace(gain, kept=kept.get(number, ())) for number, gain in enumerate(gains)]


def _affordable(mapper: KVMapper, hidden: int, size_budget: float) -> int:
    """How many networks the budget holds."""
    one = replace(mapper.config, repair=Repair(hidden, (0,), ()))
    shapes, linear = tensor_shapes(one), mapper.tensors()
    numbers = sum(torch.Size(shape).numel() for name, shape in shapes.items() if name not in linear)
    size = numbers * mapper.key_weight.dtype.itemsize
    budget = int(size_budget * mapper.size_bytes)
    if budget < size:
        raise UsageError(
            f"A size budget of {size_budget:g} of the mapper is {budget} bytes; expected at least "
            f"{size}, one network.",
            "Raise --size-budget, or lower --hidden.",
        )
    return budget // size


def _sequences(
    source: ModelSpec,
    target: ModelSpec,
    token_batches: Iterable[TokenBatch | Tensor],
    held_out_every: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """Ids without padding: of fitted sequences, and of held-out ones, as calibration has them."""
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    vocabulary, counted = min(source.vocab_size, target.vocab_size), 0
    for batch in token_batches:
        if isinstance(batch, Tensor):
            numbers = tuple(range(counted, counted + len(batch)))
            batch = TokenBatch(batch, torch.ones_like(batch), numbers)
        counted += len(batch.sequence_ids)
        rows = zip(batch.input_ids, batch.attention_mask, batch.sequence_ids, strict=True)
        for padded, mask, number in rows:
            ids = padded[mask.bool()]
            if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
                raise UsageError(
                    f"Token ids must be below the smaller vocabulary, {vocabulary}; found "
                    f"{int(ids.min())} to {int(ids.max())}.",
                    "Tokenize with the tokenizer of the pair.",
                )
            parts[number % held_out_every == held_out_every - 1].append(ids)
    fitted, held_out = parts
    # Shorter ones leave nothing to map, or nobody to ask.
    held_out = [ids for ids in held_out if int(PREFIX_FRACTION * len(ids)) > EXACT_PREFIX]
    if not fitted or not held_out:
        raise UsageError(
            f"{counted} sequences leave {len(fitted)} to train on and {len(held_out)} held out; "
            "both must be above 0.",
            f"Give at least {held_out_every} sequences, longer than {2 * EXACT_PREFIX} tokens.",
        )
    return fitted, held_out


def _with_networks(
    mapper: KVMapper, networks: Mapping[Task, Sequence[Tensor]], hidden: int
) -> KVMapper:
    layers = {
        kind: tuple(sorted(task.layer for task in networks if task.kind == kind))
        for kind in ("key", "value")
    }
    config = replace(mapper.config, repair=Repair(hidden, layers["key"], layers["value"]))
    tensors = mapper.tensors()
    for kind, of_kind in layers.items():
        # In the order in which the shapes are listed, as `Task`'s networks are.
        names = [name for name in tensor_shapes(config) if name.startswith(f"{kind}_repair")]
        for number, name in enumerate(names):
            stacked = torch.stack([networks[Task(kind, layer)][number] for layer in of_kind])
            tensors[name] = stacked.to(mapper.key_weight)
    return KVMapper(config, tensors)


def _cosines(
    pairs: Mapping[str, tuple[KVMapper, KVMapper]],
    models: "tuple[PreTrainedModel, PreTrainedModel]",
    sequences: Sequence[Tensor],
    layers: Iterable[int],
) -> dict[str, dict[int, float]]:
    """Mean attention-output cosine over sequences, by name and target layer.

    Parameters
    ----------
    pairs
        By name: what maps the keys, and what maps the values.
    layers
        The target layers to look at.
    """
    source_model, target_model = models
    config = next(iter(pairs.values()))[0].config
    meter = FidelityMeter(config.target)
    sums = {name: dict.fromkeys(layers, 0.0) for name in pairs}
    for ids in batches_of(sequences):
        batch = TokenBatch(ids, torch.ones_like(ids), tuple(range(len(ids))))
        content = content_states(source_model, batch, config.source)
        prefix = int(PREFIX_FRACTION * ids.shape[1])
        # Once per mapper: it may map the keys of one pair and the values of another.
        mapped = {
            mapper: _map(mapper, content, len(ids), prefix)
            for mapper in {mapper for pair in pairs.values() for mapper in pair}
        }

        def compare(
            layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float
        ) -> None:
            for name, (of_keys, of_values) in pairs.items():
                if layer not in sums[name]:
                    continue
                states = mapped[of_keys][0][layer], mapped[of_values][1][layer]  # noqa: B023
                # As the hand-off does: the first positions are the target's own.
                exact = [
                    torch.cat([own[:, :, :EXACT_PREFIX], part.to(own)[:, :, EXACT_PREFIX:]], dim=2)
                    for own, part in zip((keys, values), states, strict=True)
                ]
                found = meter.update(layer, queries, keys, values, exact[0], exact[1], scaling)
                sums[name][layer] += float(found.sum())

        with observe_attention(target_model, compare):
            prefill(target_model, ids.to(target_model.device), logits_to_keep=1)
    return {
        name: {layer: total / len(sequences) for layer, total in of_layer.items()}
        for name, of_layer in sums.items()
    }


@torch.no_grad()
def _map(
    mapper: KVMapper, content: Mapping[str, Tensor], batch: int, prefix: int
) -> tuple[Tensor, Tensor]:
    """Rotated keys, and values: `[target_layers, batch, kv_heads, prefix, head_dim]`."""
    device, found = mapper.key_weight.device, []
    for kind, apply in (("keys", mapper.map_keys), ("values", mapper.map_values)):
        # [target_layers, 1, kv_heads, batch * tokens, head_dim] as content states come
        states = apply(content[kind].to(device)[:, None]).float()
        layers, _, kv_heads, _, head_dim = states.shape
        states = states.view(layers, kv_heads, batch, -1, head_dim).transpose(1, 2)
        found.append(states[..., :prefix, :])
    positions = torch.arange(prefix, device=device)
    rope = mapper.config.target.require_rope()
    return apply_rope(found[0], positions, rope), found[1]
