"""Compare what kvhub reads and writes with vLLM's own operator, in every dtype and geometry."""

import sys

import torch
from kvhub_runtime.vllm_pool import open_pool, require_packing
from vllm import _custom_ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

BLOCKS, HEADS = 5, 3


def compare(dtype, dim, size):
    isa = _get_attn_isa(dtype, size, dim)
    try:
        require_packing(isa)
    except Exception:
        return "refused"
    cache = torch.zeros(BLOCKS, HEADS, size, 2 * dim, dtype=dtype)
    pool = open_pool(
        {"model.layers.0.self_attn.attn": cache},
        heads=(0, HEADS),
        head_dim=dim,
        tokens_per_block=size,
        chunk_tokens=size,
    )
    keys, values = (torch.randn(2 * size, HEADS, dim).to(dtype) for _ in range(2))
    blocks = [4, 1]
    slots = torch.cat([torch.arange(size) + size * block for block in blocks])
    parts = cache.view(BLOCKS, HEADS, 2 * size, dim).chunk(2, 2)
    _custom_ops.cpu_attn_reshape_and_cache(keys, values, *parts, slots, isa)
    written = cache.clone()
    for number, block in enumerate(blocks):
        cells = slice(number * size, (number + 1) * size)
        expected = torch.stack([keys[cells], values[cells]]).transpose(1, 2)[None]
        read = pool.read(0, [block])
        if not torch.equal(read, expected):
            return "read differently"
        cache[block] = 0
        pool.write(0, [block], read)
    return "equal" if torch.equal(cache, written) else "written differently"


results = {
    f"{dtype} {dim} {size}": compare(dtype, dim, size)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for dim in CPUAttentionBackend.get_supported_head_sizes()
    for size in (32, 128)
}
wrong = {name: found for name, found in results.items() if found not in ("equal", "refused")}
equal = sum(found == "equal" for found in results.values())
sys.stdout.write(f"{equal} equal, {len(results) - equal - len(wrong)} refused, {wrong} wrong\n")
sys.exit(bool(wrong) or not equal)
