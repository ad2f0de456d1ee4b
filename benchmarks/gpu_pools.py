"""Mappers and paged caches of random numbers for `gpu.py`, at real and at toy size."""

from dataclasses import dataclass, replace

import torch
from common import QWEN3, mapper_config
from kvhub.exporters.map_plan import MapPlan
from kvhub.exporters.paged_cache import PagedCache
from kvhub.exporters.plan import make_plan
from torch import Tensor

from kvhub import KVMapper, ModelSpec
from kvhub.mapper_config import tensor_shapes

FILL = 7.25  # exact in every dtype
UNUSED = (-1, 2**31 - 1)  # what a table may hold where no token needs a block
SPARE_BLOCKS = 3

QWEN3_32B = {
    **QWEN3,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "tie_word_embeddings": False,
}
QWEN3_14B = {
    **QWEN3_32B,
    "intermediate_size": 17408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
}
TINY = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 65536,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
# The ropes that differ most: attention scaling; a partial and interleaved rotation; the usual one.
SCALED = {**TINY, "model_type": "arcee", "rope_scaling": YARN, "rope_theta": 5e4}
PARTIAL = {**TINY, "model_type": "glm4", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
PLAIN = {**TINY, "model_type": "qwen3", "rope_theta": 1e6, "tie_word_embeddings": False}


@dataclass(frozen=True)
class Sizes:
    """What runs on a device.

    Attributes
    ----------
    source, target
        The models' config.json.
    top_k, dtype
        Of the mapper; the caches have that dtype too.
    tokens
        Context lengths, rising.
    large
        Lengths of the rows of the large correctness check, and their first positions.
    tokens_per_block
        Of both pools.
    seconds
        To spend on the runs of one figure; 0 for a single one.
    """

    source: dict
    target: dict
    top_k: int
    dtype: torch.dtype
    tokens: tuple[int, ...]
    large: tuple[tuple[int, ...], tuple[int, ...]]
    tokens_per_block: int
    seconds: float

    @property
    def specs(self) -> tuple[ModelSpec, ModelSpec]:
        return ModelSpec.from_config(self.source), ModelSpec.from_config(self.target)


REAL = Sizes(
    source=QWEN3_14B,
    target=QWEN3_32B,
    top_k=8,
    dtype=torch.bfloat16,
    tokens=(512, 2048, 8192, 32768),
    # Together 32768 tokens, so that the target's pool has more numbers than an int32 counts.
    large=((30001, 0, 2700, 67), (0, 5, 7000, 30000)),
    tokens_per_block=32,  # TensorRT-LLM's default
    seconds=1.0,
)
TOY = Sizes(
    source={**PLAIN, "num_hidden_layers": 2},
    target={**PLAIN, "num_hidden_layers": 2},
    top_k=2,
    dtype=torch.float16,  # Triton's interpreter computes bfloat16 wrongly
    tokens=(5, 40),
    large=((131, 0, 1, 17), (0, 5, 7000, 30000)),
    tokens_per_block=8,
    seconds=0.0,
)


def random_plan(
    pair: tuple[ModelSpec, ModelSpec],
    heads: str,
    top_k: int,
    dtype: torch.dtype,
    device: torch.device,
) -> MapPlan:
    """A plan whose outputs have a variance of about one, made on the device."""
    config = mapper_config(*pair, heads, top_k)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        std = shape[-2] ** -0.5 if name.endswith("weight") else 0.5
        tensors[name] = torch.empty(shape, dtype=dtype, device=device).normal_(0, std)
    return make_plan(KVMapper(config, tensors))


def filled_cache(
    spec: ModelSpec,
    tokens_per_block: int,
    dtype: torch.dtype,
    lengths: tuple[int, ...],
    starts: tuple[int, ...],
    device: torch.device,
    *,
    padded: bool = False,
) -> tuple[PagedCache, Tensor]:
    """A cache full of `FILL` with a shuffled block table, and the buffer that its pool lies in.

    The buffer goes on around the pool: for a block on both sides, or in every dim if `padded`.
    """
    needed = [-(-length // tokens_per_block) for length in lengths]
    blocks = sum(needed) + SPARE_BLOCKS
    shape = (blocks, spec.num_layers, 2, spec.kv_heads, tokens_per_block, spec.head_dim)
    # Heads stay aligned to 16 bytes, as the kernels require.
    margins = (1, 1, 1, 1, 1, 8) if padded else (1, 0, 0, 0, 0, 0)
    outer = [size + 2 * margin for size, margin in zip(shape, margins, strict=True)]
    buffer = torch.full(outer, FILL, dtype=dtype, device=device)
    inner = zip(shape, margins, strict=True)
    pool = buffer[tuple(slice(margin, margin + size) for size, margin in inner)]
    table = torch.tensor(UNUSED * (max(needed) // 2 + 1)).repeat(len(lengths), 1).int()
    order = torch.randperm(blocks).int().split([*needed, SPARE_BLOCKS])
    for row, ids in enumerate(order[:-1]):
        table[row, : len(ids)] = ids
    counts = (torch.tensor(numbers, device=device) for numbers in (lengths, starts))
    return PagedCache(pool, table.to(device), *counts), buffer


def source_cache(
    spec: ModelSpec,
    tokens_per_block: int,
    dtype: torch.dtype,
    lengths: tuple[int, ...],
    starts: tuple[int, ...],
    device: torch.device,
    *,
    padded: bool = False,
) -> PagedCache:
    """A cache of normal numbers in exactly its tokens' cells, NaN in all others."""
    cache, buffer = filled_cache(
        spec, tokens_per_block, dtype, lengths, starts, device, padded=padded
    )
    buffer.fill_(float("nan"))
    blocks, slots = places(cache)
    for layer in range(spec.num_layers):
        shape = (len(blocks), 2, spec.kv_heads, spec.head_dim)
        states = torch.empty(shape, dtype=dtype, device=device).normal_()
        cache.pool[:, layer][blocks, :, :, slots] = states
    return cache


def places(cache: PagedCache) -> tuple[Tensor, Tensor]:
    """The block and the slot of every token, row by row, read off the table one row at a time.

    Not `PagedCache.cells`, which what is checked here uses.
    """
    size, table = cache.pool.shape[4], cache.block_table.cpu()
    tokens = [torch.arange(length) for length in cache.lengths.tolist()]
    blocks = torch.cat([table[row, part // size].long() for row, part in enumerate(tokens)])
    return blocks.to(cache.pool.device), (torch.cat(tokens) % size).to(cache.pool.device)


def positions(cache: PagedCache) -> Tensor:
    """The absolute position of every token, in the order of `places`."""
    rows = zip(cache.start_positions.tolist(), cache.lengths.tolist(), strict=True)
    parts = [torch.arange(start, start + length) for start, length in rows]
    return torch.cat(parts).to(cache.pool.device)


def first_tokens(cache: PagedCache, tokens: int) -> PagedCache:
    """A cache of one row, shortened: same pool, so that no kernel is compiled again."""
    return replace(cache, lengths=torch.full_like(cache.lengths, tokens))
