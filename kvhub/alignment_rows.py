"""What a batch of text adds to the sums of an aligned fit, for one target layer.

Keys. An error d in a content key of token t moves the logit of a query q by s q^T R_t d, and the
attention output by a_t (v_t - o) times that, to first order. Squared, summed over queries, and
averaged over the directions of d:

    w_t = sum_q a_qt^2 |v_t - o_q|^2 |q|^2

(`attention_sensitivity`). This is the diagonal, over tokens, of the problem that `kvhub.key_fit`
solves, and its features weighted like this make that problem's preconditioner. The first tokens
have their weights too, however large: without them the first steps gain little on SmolLM2.

Values. With the mapped keys in place, let a^ be the attention that the target pays then, and E the
exact tokens. What it reads of the mapped ones should be what is missing to its true output:

    sum_{t not in E} a^_qt (W^T x_t + b)  =  o_q - sum_{t in E} a^_qt v_t

which is linear in (W, b): a row per query, of the features sum a^_qt x_t and of the mass
sum a^_qt, that is the bias's feature. Query heads that share a KV head share its W, so all are rows
of one regression. Where nothing is exact, as in engines, the tokens of E are mapped too, and an
error in such a value moves the outputs by a^_qt times it: each is a row of its own, of the features
x_t, the mass 1 and the weight sum_q a^_qt^2, towards v_t.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvhub.attention import attention_sensitivity, attention_weights
from kvhub.compatibility import Heads
from kvhub.moments import group_features
from kvhub.rope import Rope, apply_rope

__all__ = ["Layer", "Rows", "key_rows", "map_layer", "value_rows"]


@dataclass(frozen=True)
class Layer:
    """What a target layer's attention sees of a batch: rotated space, the model's dtype.

    Attributes
    ----------
    queries
        `[batch, attention_heads, tokens, head_dim]`.
    keys, values
        `[batch, kv_heads, tokens, head_dim]`.
    scaling
        Factor on the scores.
    mask
        `[batch, tokens]`, 0 on padding, which is on the right.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    mask: Tensor


@dataclass(frozen=True)
class Rows:
    """Rows of regressions that share no coefficients between groups.

    Attributes
    ----------
    features, outputs
        `[rows, groups, features]` and `[rows, groups, outputs]`.
    weights
        `[rows, groups]`, or None: all alike.
    sequences
        `[rows]` int64: which sequence of the batch a row is from.
    """

    features: Tensor
    outputs: Tensor
    weights: Tensor | None
    sequences: Tensor


def key_rows(layer: Layer, source_keys: Tensor, heads: Heads) -> Rows:
    """A row per token, weighted as in the module's docstring, without outputs.

    Parameters
    ----------
    layer
        Of the target, over the batch.
    source_keys
        `[top_k, kv_heads, batch * tokens, head_dim]` content keys of the layer's source layers.
    heads
        Of the mapper; `all` takes the mean of the heads' weights.
    """
    sensitivity, _ = attention_sensitivity(
        layer.queries, layer.keys, layer.values, layer.scaling, layer.mask
    )
    if heads == "all":
        # Each head counts alike.
        total = sensitivity.sum(-1, keepdim=True).clamp(min=1e-30)
        sensitivity = (sensitivity / total).mean(1, keepdim=True)
    weights = sensitivity.clamp(min=1e-30)  # of a lone token, whose key nothing depends on, too
    used = layer.mask.flatten().nonzero()[:, 0]
    features = group_features(source_keys, heads)[used]
    return Rows(
        features=features,
        outputs=features[..., :0],
        weights=weights.permute(0, 2, 1).flatten(0, 1)[used],
        sequences=used // layer.mask.shape[1],
    )


def value_rows(
    layer: Layer,
    mapped_keys: Tensor,
    source_values: Tensor,
    heads: Heads,
    exact_prefix: int,
) -> Iterator[Rows]:
    """A row per query and query head of a KV head, which is the group; some at a time.

    Neighbouring queries read almost the same, so of the queries every n-th is used, n the query
    heads of a KV head: as many rows as tokens. Last comes a row for each exact token.

    Parameters
    ----------
    layer
        Of the target, over the batch.
    mapped_keys
        `[batch, kv_heads, tokens, head_dim]`, rotated space, as the mapper maps them.
    source_values
        `[top_k, kv_heads, batch * tokens, head_dim]` of the layer's source layers.
    heads
        Of the mapper.
    exact_prefix
        Tokens at the start, E: exact in a hand-off and mapped in engines.

    Yields
    ------
    rows
        Features are those of the mapper and, last, the mass.
    """
    batch, kv_heads, tokens, _ = layer.keys.shape
    exact_prefix = min(exact_prefix, tokens)
    keys = torch.cat([layer.keys[:, :, :exact_prefix], mapped_keys[:, :, exact_prefix:]], dim=2)
    features = group_features(source_values, heads)
    # [batch, kv_heads or 1, 1, tokens, features]
    features = features.view(batch, tokens, *features.shape[1:]).permute(0, 2, 1, 3)[:, :, None]
    values = layer.values.to(features.dtype)[:, :, None]
    step = layer.queries.shape[1] // kv_heads
    arguments = (layer.scaling, layer.mask)
    squares = torch.zeros(batch, exact_prefix, kv_heads, dtype=values.dtype, device=keys.device)
    for (span, true), (_, mapped) in zip(
        attention_weights(layer.queries, layer.keys, *arguments),
        attention_weights(layer.queries, keys, *arguments),
        strict=True,
    ):
        queries = torch.arange(span.start, span.stop, device=keys.device)
        chosen = (queries >= exact_prefix) & (queries % step == 0)
        true, mapped = true[:, :, :, chosen], mapped[:, :, :, chosen]
        exact, others = mapped[..., :exact_prefix], mapped[..., exact_prefix:]
        squares += exact.square().sum((2, 3)).transpose(1, 2)
        outputs = true @ values - exact @ values[..., :exact_prefix, :]
        read = others @ features[..., exact_prefix:, :]
        read = torch.cat([read, others.sum(-1, keepdim=True)], dim=-1)
        # [batch, kv_heads, heads of a KV head, queries, ...] to rows
        rows = layer.mask[:, queries[chosen]].bool()[:, None].expand(-1, step, -1).flatten()
        sequences = torch.arange(batch, device=keys.device).repeat_interleave(len(rows) // batch)
        yield Rows(
            features=read.movedim(1, 3).flatten(0, 2)[rows],
            outputs=outputs.movedim(1, 3).flatten(0, 2)[rows],
            weights=None,
            sequences=sequences[rows],
        )
    first = features[:, :, 0, :exact_prefix].expand(-1, kv_heads, -1, -1)
    first = torch.cat([first, torch.ones_like(first[..., :1])], dim=-1)
    rows = (squares > 0).all(-1).flatten()
    if not bool(rows.any()):
        return
    yield Rows(
        features=first.transpose(1, 2).flatten(0, 1)[rows],
        outputs=values[:, :, 0, :exact_prefix].transpose(1, 2).flatten(0, 1)[rows],
        weights=squares.flatten(0, 1)[rows],
        sequences=torch.arange(batch, device=keys.device).repeat_interleave(exact_prefix)[rows],
    )


def map_layer(
    states: Tensor,
    weights: Tensor,
    bias: Tensor,
    heads: Heads,
    batch: int,
    head_dim: int,
    rope: Rope | None = None,
) -> Tensor:
    """X W + b of a target layer, rotated if `rope` is given, for positions from 0.

    Parameters
    ----------
    states
        `[top_k, kv_heads, batch * tokens, head_dim]` of the layer's source layers, content space.
    weights, bias
        `[groups, features, outputs]` and `[groups, outputs]`.

    Returns
    -------
    states
        `[batch, kv_heads, tokens, head_dim]` of the target.
    """
    features = group_features(states, heads)
    mapped = torch.einsum("tgf,gfo->tgo", features, weights.to(features.dtype)) + bias.to(features)
    tokens = len(mapped) // batch
    mapped = mapped.reshape(batch, tokens, -1, head_dim).transpose(1, 2)
    if rope is None:
        return mapped
    positions = torch.arange(tokens, device=mapped.device)
    return apply_rope(mapped, positions, rope)
