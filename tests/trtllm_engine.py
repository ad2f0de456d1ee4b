"""A tiny paged attention engine in torch for Llama and Qwen3 like transformers models.

Stands for the model engine of TensorRT-LLM: keys are stored after QK norm and RoPE, per rank in a
pool of its own that has the rank's KV heads. Tensor parallelism is simulated in one process: every
rank attends with its heads, and what the ranks put out is summed up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from trtllm_api import Version, layout_class
from trtllm_blocks import KvCacheBufferRef, KvCacheLayerGroupLayout, KvCacheRegion

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
GAP = 64  # bytes between the slots of a V2 pool, so that stride and size differ


@dataclass
class Chunk:
    """Tokens of one request that a forward pass computes, and where the sequence lies."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]


class Batch:
    """The chunks of one forward pass, one row per token."""

    def __init__(self, chunks: Sequence[Chunk], size: int) -> None:
        self.counts = [len(chunk.tokens) for chunk in chunks]
        spans = [torch.arange(c.start, c.start + len(c.tokens)) for c in chunks]
        self.ids = torch.tensor([token for chunk in chunks for token in chunk.tokens])
        self.positions = torch.cat(spans)
        self.blocks = torch.cat(
            [torch.tensor(c.blocks)[span // size] for c, span in zip(chunks, spans, strict=True)]
        )
        # Chunks that attend in one call, and their rows: all those of one token, else each alone.
        rows = torch.arange(len(self.ids)).split(self.counts)
        alone = [([c], own) for c, own in zip(chunks, rows, strict=True) if len(c.tokens) > 1]
        single = [(c, own) for c, own in zip(chunks, rows, strict=True) if len(c.tokens) == 1]
        self.together = alone
        if single:
            steps, places = zip(*single, strict=True)
            self.together = [*alone, (list(steps), torch.cat(places))]


@dataclass
class Group:
    """Layers with one window; V1 has one group. `slots[block]` is the page slot of a block."""

    layers: tuple[int, ...]
    window: int | None
    slots: torch.Tensor
    pools: list[torch.Tensor] = field(default_factory=list)  # per rank, six dimensions


class Engine:
    """Runs `model` on paged pools, one for each rank.

    A pool is `[num_blocks, layers, 2, kv_heads / ranks, tokens_per_block, head_dim]`.
    """

    def __init__(
        self,
        model: Any,
        version: Version,
        num_blocks: int,
        tokens_per_block: int,
        ranks: int = 1,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        config = model.config
        if config.model_type not in FAMILIES:
            raise ValueError(f"this engine runs {FAMILIES}, not {config.model_type}")
        self.model, self.size, self.ranks = model, tokens_per_block, ranks
        self.layers = list(model.model.layers)
        self.attention = [layer.self_attn for layer in self.layers]
        self.head_dim = self.attention[0].head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        if self.kv_heads % ranks:
            raise ValueError(f"{self.kv_heads} KV heads do not divide among {ranks} ranks")
        by_window: dict[int | None, list[int]] = {}
        for index, attention in enumerate(self.attention):
            window = getattr(attention, "sliding_window", None)
            by_window.setdefault(window, []).append(index)
        if set(by_window) != {None} and not version.layout:
            raise NotImplementedError("sliding windows are modelled with the V2 layout only")
        generator = torch.Generator().manual_seed(seed)
        self.groups = [
            Group(
                tuple(layers),
                window,
                torch.randperm(num_blocks, generator=generator)
                if version.layout
                else torch.arange(num_blocks),
            )
            for window, layers in by_window.items()
        ]
        self.place = {
            layer: (group, index)
            for group in self.groups
            for index, layer in enumerate(group.layers)
        }
        for group in self.groups:
            shape = (len(group.layers), 2, self.kv_heads // ranks, tokens_per_block, self.head_dim)
            for _ in range(ranks):
                group.pools.append(_pool(num_blocks, shape, dtype, GAP if version.layout else 0))

    def unique_pool(self, rank: int) -> torch.Tensor:
        """`[num_blocks, layers, 2, heads * tokens * head_dim]`, contiguous, as V1 registers it."""
        return self.groups[0].pools[rank].flatten(3)

    def layout(self, rank: int, version: Version) -> Any:
        """The KvCacheLayout that V2 registers: one strided region for each group."""
        groups = []
        for number, group in enumerate(self.groups):
            pool = group.pools[rank]
            region = KvCacheRegion(
                base=pool.data_ptr(),
                size=pool[0].numel() * pool.element_size(),
                stride=pool.stride(0) * pool.element_size(),
                num_slots=len(pool),
                buffers=tuple(
                    KvCacheBufferRef(layer, role)
                    for layer in group.layers
                    for role in ("key", "value")
                ),
            )
            groups.append(KvCacheLayerGroupLayout(number, group.layers, group.window, (region,)))
        last = {"dtype": pool.dtype} if version.layout == "dtype" else {}
        return layout_class(version)(self.size, tuple(groups), **last)

    def copy_block(self, source: int, target: int) -> None:
        for group in self.groups:
            for pool in group.pools:
                pool[group.slots[target]] = pool[group.slots[source]]

    @torch.no_grad()
    def forward(
        self,
        chunks: Sequence[Chunk],
        before: Callable[[int], None] = lambda layer: None,
        after: Callable[[int], None] = lambda layer: None,
    ) -> list[int]:
        """Compute the chunks and return the most likely next token after each.

        `before` and `after` are called around each layer, as the hooks of the connector are.
        """
        batch = Batch(chunks, self.size)
        hidden = self.model.model.embed_tokens(batch.ids)
        rope = self.model.model.rotary_emb(hidden, batch.positions[None])
        cos, sin = (table[0] for table in rope)
        for index, layer in enumerate(self.layers):
            before(index)
            queries, keys, values = self._project(index, layer.input_layernorm(hidden))
            queries, keys = _rotate(queries, cos, sin), _rotate(keys, cos, sin)
            for rank in range(self.ranks):
                hidden = hidden + self._attend(index, rank, batch, queries, keys, values)
            if self.attention[index].o_proj.bias is not None:
                hidden = hidden + self.attention[index].o_proj.bias
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            after(index)
        ends = torch.tensor(batch.counts).cumsum(0) - 1
        logits = self.model.lm_head(self.model.model.norm(hidden[ends]))
        return logits.argmax(-1).tolist()

    def _project(self, index: int, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        attention = self.attention[index]
        queries, keys, values = (
            projection(hidden).view(len(hidden), -1, self.head_dim)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            queries, keys = attention.q_norm(queries), attention.k_norm(keys)
        return queries, keys, values

    def _attend(
        self,
        index: int,
        rank: int,
        batch: Batch,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Write the rank's keys and values to its pool, and return its share of the output."""
        group, place = self.place[index]
        pool, attention = group.pools[rank][:, place], self.attention[index]
        kv, q = (
            slice(rank * heads // self.ranks, (rank + 1) * heads // self.ranks)
            for heads in (self.kv_heads, self.heads)
        )
        states = torch.stack((keys[:, kv], values[:, kv]), 1).to(pool.dtype)
        pool[group.slots[batch.blocks], :, :, batch.positions % self.size] = states
        mixed = torch.empty_like(queries[:, q])
        for chunks, rows in batch.together:
            # What the window has passed is not read: there may be no page, and 0 * NaN is NaN.
            first = max(0, min(c.start for c in chunks) + 1 - group.window) if group.window else 0
            mask = _visible(chunks, first, group.window)
            length = first + mask.shape[-1]
            blocks = [list(c.blocks[: -(-length // self.size)]) for c in chunks]
            width = max(map(len, blocks))
            used = torch.tensor([ids + ids[:1] * (width - len(ids)) for ids in blocks])
            # [rows, blocks, 2, heads, tokens, head_dim] -> [2, rows, heads, tokens, head_dim]
            seen = pool[group.slots[used]].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
            seen = seen[:, :, :, first:length].to(queries.dtype)
            seen = seen.where(mask.any(1)[None, :, None, :, None], 0.0)
            own = queries[rows, q].unflatten(0, (len(chunks), -1)).transpose(1, 2)
            out = scaled_dot_product_attention(
                own,
                seen[0],
                seen[1],
                attn_mask=mask[:, None],
                scale=attention.scaling,
                enable_gqa=True,
            )
            mixed[rows] = out.transpose(1, 2).flatten(0, 1)
        columns = slice(q.start * self.head_dim, q.stop * self.head_dim)
        return mixed.flatten(1) @ attention.o_proj.weight[:, columns].T


def _visible(chunks: Sequence[Chunk], first: int, window: int | None) -> torch.Tensor:
    """`[chunks, tokens, positions from first on]`: which states a token attends to."""
    tokens = torch.stack([torch.arange(c.start, c.start + len(c.tokens)) for c in chunks])
    distance = tokens[:, :, None] - torch.arange(first, int(tokens.max()) + 1)
    return (distance >= 0) & (distance < (window or int(tokens.max()) + 1))


def _pool(count: int, shape: tuple[int, ...], dtype: torch.dtype, gap: int) -> torch.Tensor:
    """A pool full of NaN, which shows wherever states are read that nobody wrote."""
    numel = torch.Size(shape).numel()
    stride = numel + gap // dtype.itemsize
    flat = torch.full((count * stride,), float("nan"), dtype=dtype)
    inner = torch.empty(shape, device="meta").stride()
    return flat.as_strided((count, *shape), (stride, *inner))


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = states.chunk(2, -1)
    return states * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]
