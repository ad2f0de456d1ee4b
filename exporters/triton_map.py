"""The map on paged pools as Triton kernels: what they need, checked; and their launches."""

from itertools import chain

import torch
from kvhub.exporters.map_plan import MapPlan, RopeTable
from kvhub.exporters.paged_cache import PagedCache, check_caches, require_finite
from torch import Tensor

from kvhub.errors import UsageError, VerificationError
from kvhub.products import WORKSPACE_BYTES
from kvhub.rope import Rotation

__all__ = ["TritonMap", "gather_constants", "multiply_constants", "multiply_options"]

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (16, 32, 64, 128, 256)
MAX_SLOTS = 256  # a slot's number is a byte
ALIGNMENT = 16  # bytes, of TMA and of the widest loads
CELL_ALIGNMENT = 8  # numbers
BLOCK_TOKENS = 128  # two warp groups, 64 rows each
MAX_BLOCK_OUTPUTS = 256
MAX_BLOCK_FEATURES = 64
GATHER_TOKENS = 32
GATHER_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


class TritonMap:
    """A mapper as Triton kernels, with all the memory that they need.

    Products take the plan's dtype and sum in float32; rotations are float32. The result is that of
    `map_paged` but for the rounding of content keys to the plan's dtype.

    Parameters
    ----------
    plan
        The mapper, float16 or bfloat16, on a GPU of compute capability 9.0 or more (Triton's
        interpreter runs on the CPU). Its values' weights are shared, its keys' weights copied.
    workspace_bytes
        Bound on what mapping allocates besides that and a few numbers per row and table entry: it
        takes as many tokens at once as fit.

    Raises
    ------
    UsageError
        The plan is not one that the kernels can compute, or the workspace holds too few tokens.
    """

    def __init__(self, plan: MapPlan, *, workspace_bytes: int = WORKSPACE_BYTES) -> None:
        _require_supported(plan)
        from triton.tools.tensor_descriptor import TensorDescriptor

        self.plan = plan
        chosen = plan.gather.tolist()
        used = sorted({*chain(*chosen)})
        heads, head_dim = plan.source_kv_heads, plan.source_head_dim
        self.tokens_at_once = _tokens_at_once(plan, len(used), workspace_bytes)
        self.layers = torch.tensor(used, dtype=torch.int32, device=plan.device)
        self.slots = torch.tensor(
            [_pack([used.index(layer) for layer in layers]) for layers in chosen],
            device=plan.device,
        )
        # Zeros: rows that a context does not fill are multiplied too, though never written.
        self.scratch = torch.zeros(
            (len(used), self.tokens_at_once, heads * head_dim),
            dtype=plan.dtype,
            device=plan.device,
        )
        self.flag = torch.zeros(1, dtype=torch.int32, device=plan.device)
        order = _pair_order(plan.target_rope, plan.target_head_dim).to(plan.device)
        key_weight = torch.empty_like(plan.key_weight)
        for layer, weight in enumerate(plan.key_weight):
            key_weight[layer] = _reordered(weight, order)
        features, outputs = block_features(plan), block_outputs(plan)
        self.scratch_descriptor = TensorDescriptor.from_tensor(
            self.scratch.flatten(0, 1), [BLOCK_TOKENS, features]
        )
        self.weights = [
            TensorDescriptor.from_tensor(weight.view(-1, plan.outputs), [features, outputs])
            for weight in (key_weight, plan.value_weight)
        ]
        self.biases = [_reordered(plan.key_bias, order).float(), plan.value_bias.float()]

    def __call__(self, source: PagedCache, target: PagedCache) -> None:
        """Map every token of `source` into the blocks of `target`, as `map_paged` does.

        Waits for the device.

        Raises
        ------
        IncompatiblePairError, UsageError
            As for `check_caches`; or a pool whose cells are not aligned.
        VerificationError
            The source is not finite, or what it maps to is not in the target's dtype: the target's
            blocks are then of no use.
        """
        check_caches(self.plan, source, target)
        for side, cache in (("source", source), ("target", target)):
            _require_aligned(side, cache)
        tokens = int(source.lengths.sum())
        self.flag.zero_()
        self.enqueue(source, target, tokens)
        if not int(self.flag):
            return
        require_finite(source, (0, tokens), self.layers.tolist(), "source")
        require_finite(target, (0, tokens), range(self.plan.target_layers), "mapped")
        raise VerificationError(
            f"Mapped keys or values are too large for {target.pool.dtype}.",
            "Use a wider dtype (bfloat16 or float32), or prefill the target itself.",
        )

    def enqueue(self, source: PagedCache, target: PagedCache, tokens: int) -> None:
        """Launch all kernels on the current stream and wait for nothing.

        Parameters
        ----------
        source, target
            As checked by `__call__`; unchecked ones can corrupt memory.
        tokens
            The sum of their lengths. `flag` holds 1 afterwards if a result was not finite.
        """
        for start in range(0, tokens, self.tokens_at_once):
            span = (start, min(start + self.tokens_at_once, tokens))
            self._gather_and_multiply(source, target, span)

    def _gather_and_multiply(
        self, source: PagedCache, target: PagedCache, span: tuple[int, int]
    ) -> None:
        from kvhub.exporters import triton_kernels as kernels

        plan, tokens = self.plan, span[1] - span[0]
        reads, writes = source.cells(*span), target.cells(*span)
        strip = Rotation(reads.positions, plan.source_rope, device=plan.device)
        apply = Rotation(writes.positions, plan.target_rope, device=plan.device)
        strip_tables = _tables(strip.strip_cos, strip.strip_sin, plan.source_head_dim)
        apply_tables = _tables(apply.cos, apply.sin, plan.target_head_dim)
        read_cells = reads.blocks * source.pool.stride(0) + reads.slots * source.pool.stride(4)
        write_cells = writes.blocks * target.pool.stride(0) + writes.slots * target.pool.stride(4)
        gather_grid = (_blocks(tokens, GATHER_TOKENS), len(self.layers))
        groups = plan.groups * _blocks(plan.outputs, block_outputs(plan))
        multiply_grid = (_blocks(tokens, BLOCK_TOKENS), groups, plan.target_layers)
        for kind, weights, biases in zip((0, 1), self.weights, self.biases, strict=True):
            keys = kind == 0
            kernels.gather[gather_grid](
                source.pool[:, :, kind],
                read_cells,
                self.layers,
                *strip_tables,
                self.scratch,
                tokens,
                self.tokens_at_once,
                **gather_constants(plan, source.pool, keys=keys),
                **GATHER_OPTIONS,
            )
            kernels.multiply[multiply_grid](
                self.scratch_descriptor,
                weights,
                biases,
                self.slots,
                write_cells,
                *apply_tables,
                target.pool[:, :, kind],
                self.flag,
                tokens,
                self.tokens_at_once,
                **multiply_constants(plan, target.pool, keys=keys),
                **multiply_options(plan),
            )


def gather_constants(plan: MapPlan, pool: Tensor, *, keys: bool) -> dict[str, int]:
    """What a compilation of `gather` depends on, for the source's pool."""
    return {
        "LAYER_STRIDE": pool.stride(1),
        "HEAD_STRIDE": pool.stride(3),
        "HEADS": plan.source_kv_heads,
        "HEAD_DIM": plan.source_head_dim,
        "ROTARY_DIM": plan.source_rope.rotary_dim,
        "INTERLEAVED": plan.source_rope.interleaved,
        "STRIP": keys,
        "BLOCK_TOKENS": GATHER_TOKENS,
    }


def multiply_constants(plan: MapPlan, pool: Tensor, *, keys: bool) -> dict[str, int | float]:
    """What a compilation of `multiply` depends on, for the target's pool."""
    rope = plan.target_rope
    # Checked before the rotation, which makes a number at most this much larger.
    growth = max(1.0, rope.attention_scaling * 2**0.5) if keys else 1.0
    return {
        "LAYER_STRIDE": pool.stride(1),
        "HEAD_STRIDE": pool.stride(3),
        "GROUPS": plan.groups,
        "TOP_K": plan.top_k,
        "LAYER_FEATURES": plan.features // plan.top_k,
        "OUTPUTS": plan.outputs,
        "HEAD_DIM": plan.target_head_dim,
        "ROTARY_DIM": rope.rotary_dim,
        "INTERLEAVED": rope.interleaved,
        "APPLY": keys,
        "LIMIT": torch.finfo(pool.dtype).max / growth,
        "BLOCK_TOKENS": BLOCK_TOKENS,
        "BLOCK_OUTPUTS": block_outputs(plan),
        "BLOCK_FEATURES": block_features(plan),
    }


def multiply_options(plan: MapPlan) -> dict[str, int | bool]:
    """How `multiply` is compiled: as many stages as fit; fewer let two small tiles share an SM."""
    return {
        "num_warps": 8,
        "num_stages": 4 if block_outputs(plan) > 128 else 3,
        "enable_fp_fusion": True,
    }


def block_outputs(plan: MapPlan) -> int:
    """Outputs of a tile: a power of two and whole heads."""
    needed: int = 1 << (plan.outputs - 1).bit_length()
    return min(MAX_BLOCK_OUTPUTS, needed)


def block_features(plan: MapPlan) -> int:
    """Features of a step: the largest power of two that divides those of a layer."""
    features: int = plan.features // plan.top_k
    return min(features & -features, MAX_BLOCK_FEATURES)


def _require_supported(plan: MapPlan) -> None:
    hint = "Map with map_paged, which is plain torch."
    if plan.repair:
        raise UsageError(
            "The kernels compute linear maps; this mapper also has networks, of target layers "
            f"{sorted({layer for layers in plan.repaired.values() for layer in layers})}.",
            hint,
        )
    if plan.dtype not in DTYPES:
        raise UsageError(
            f"The kernels multiply in one of {[*map(str, DTYPES)]}, found {plan.dtype}.",
            "Make the plan with such a dtype: make_plan(mapper, dtype=...).",
        )
    for side in ("source", "target"):
        head_dim = getattr(plan, f"{side}_head_dim")
        if head_dim not in HEAD_DIMS:
            raise UsageError(
                f"The {side}'s head_dim must be one of {[*HEAD_DIMS]} for the kernels, found "
                f"{head_dim}.",
                hint,
            )
    used = len({*plan.gather.flatten().tolist()})
    if used > MAX_SLOTS:
        raise UsageError(f"Expected at most {MAX_SLOTS} source layers, found {used}.", hint)
    try:
        import triton
    except ImportError as error:
        raise UsageError(
            "The kernels need Triton, which is not installed.",
            'Run pip install "kvhub[triton]", or map with map_paged.',
        ) from error
    if triton.knobs.runtime.interpret:
        return
    capability = torch.cuda.get_device_capability(plan.device) if plan.key_weight.is_cuda else None
    if capability is None or capability < (9, 0):
        raise UsageError(
            "The kernels need a GPU of compute capability 9.0 (Hopper) or more, found "
            f"{plan.device if capability is None else capability}.",
            hint,
        )


def _require_aligned(side: str, cache: PagedCache) -> None:
    """Wide loads need aligned heads; TMA and the hints in the kernels rely on it."""
    pool = cache.pool
    for kind in (0, 1):
        if pool.numel() and pool[:, :, kind].data_ptr() % ALIGNMENT:
            raise UsageError(
                f"The {side}'s pool does not begin at a multiple of {ALIGNMENT} bytes.",
                "Pass a pool as it was allocated, or map with map_paged.",
            )
    strides = pool.stride()[:2] + pool.stride()[3:5]
    if any(stride % CELL_ALIGNMENT for stride in strides):
        raise UsageError(
            f"The {side}'s pool has strides {list(pool.stride())}; expected multiples of "
            f"{CELL_ALIGNMENT} for blocks, layers, heads and slots.",
            "Pad the pool's heads, or map with map_paged.",
        )


def _tokens_at_once(plan: MapPlan, slots: int, workspace_bytes: int) -> int:
    """Whole blocks of tokens that fit: scratch of keys or values, tables and cells.

    Raises
    ------
    UsageError
        Not one block.
    """
    scratch = slots * plan.source_kv_heads * plan.source_head_dim * plan.dtype.itemsize
    # While they are made, a table needs angles, padding and a copy.
    tables = 5 * torch.float32.itemsize * (plan.source_head_dim + plan.target_head_dim)
    cells = 16 * torch.int64.itemsize
    per_block = BLOCK_TOKENS * (scratch + tables + cells)
    tokens: int = workspace_bytes // per_block * BLOCK_TOKENS
    if not tokens:
        raise UsageError(
            f"A workspace of {workspace_bytes} bytes does not hold {BLOCK_TOKENS} tokens of this "
            f"mapper; expected at least {per_block}.",
            "Give a larger workspace_bytes.",
        )
    return tokens


def _pack(slots: list[int]) -> list[int]:
    """A byte per slot, eight to a number, the first lowest; as signed numbers."""
    parts = [bytes(slots[start : start + 8]) for start in range(0, len(slots), 8)]
    return [int.from_bytes(part.ljust(8, b"\0"), "little", signed=True) for part in parts]


def _pair_order(rope: RopeTable, head_dim: int) -> Tensor:
    """The dims of a head, pair after pair."""
    half, passing = rope.rotary_dim // 2, (head_dim - rope.rotary_dim) // 2
    dims = torch.arange(head_dim)
    if rope.interleaved:
        return dims
    rotating, rest = dims[: rope.rotary_dim], dims[rope.rotary_dim :]
    return torch.cat([rotating.view(2, half).T.flatten(), rest.view(2, passing).T.flatten()])


def _reordered(states: Tensor, order: Tensor) -> Tensor:
    """The outputs of each head in another order."""
    return states.view(*states.shape[:-1], -1, len(order))[..., order].flatten(-2)


def _tables(cos: Tensor, sin: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """`[tokens, head_dim / 2]`, pairs that pass included."""
    passing = (0, head_dim // 2 - cos.shape[-1])
    pad = torch.nn.functional.pad
    return pad(cos, passing, value=1.0).contiguous(), pad(sin, passing).contiguous()


def _blocks(number: int, size: int) -> int:
    return -(-number // size)
