"""The map on paged KV pools in plain torch: the kernels' oracle, and what runs without them."""

import torch
from kvhub.exporters.map_plan import MapPlan
from kvhub.exporters.paged_cache import (
    KEYS,
    VALUES,
    PagedCache,
    check_caches,
    layer_parts,
    require_finite,
)
from torch import Tensor

from kvhub.errors import UsageError
from kvhub.networks import add_network
from kvhub.products import CPU_ROWS, WORKSPACE_BYTES, multiply
from kvhub.rope import Rotation

__all__ = ["map_paged"]

# Work on layers that are read, rotated or written at once: few operations, each long enough for
# threads, on what stays in a CPU's cache from one to the next.
GROUP_BYTES = 8 * 2**20
# And fewer tokens at once than `CPU_ROWS` where a single layer's work would not stay there.
LAYER_BYTES = 4 * 2**20


@torch.no_grad()
def map_paged(
    plan: MapPlan, source: PagedCache, target: PagedCache, *, workspace_bytes: int = WORKSPACE_BYTES
) -> None:
    """Map every token of `source` into the blocks of `target`, row by row.

    Writes the cells of exactly these tokens in all layers of the target's pool, and nothing else.
    Everything on the plan's device. Arithmetic in the plan's dtype, but at least float32 on a CPU;
    angles are float32.

    Parameters
    ----------
    plan
        The mapper.
    source
        The source model's cache.
    target
        Where to write. As many rows of the same lengths; blocks of any size; start positions may
        differ from the source's, keys then move to where the target's say.
    workspace_bytes
        Bound on what this allocates besides a few numbers per row, table entry and layer: it takes
        as many tokens at once as fit, and then as many layers.

    Raises
    ------
    IncompatiblePairError, UsageError
        As for `check_caches`; or `workspace_bytes` does not hold one token.
    VerificationError
        The source is not finite, found before anything is written; or what it maps to is not, in
        the target's dtype: the target's blocks are then of no use.
    """
    check_caches(plan, source, target)
    total = int(source.lengths.sum())
    step = tokens_at_once(plan, workspace_bytes)
    spans = [(start, min(start + step, total)) for start in range(0, total, step)]
    at_once = _layers_at_once(plan, workspace_bytes, min(step, total))
    for span in spans:
        require_finite(source, span, range(plan.source_layers), "source", at_once)
    for span in spans:
        sums = _map_span(plan, source, target, span, at_once)
        if not bool(torch.isfinite(sums).all()):
            require_finite(target, span, range(plan.target_layers), "mapped")


def _map_span(
    plan: MapPlan, source: PagedCache, target: PagedCache, span: tuple[int, int], at_once: int
) -> Tensor:
    """Map the tokens of a span; the sums of what was written, not finite if a number is not."""
    dtype, rotation_dtype = _arithmetic(plan)
    source_cells, target_cells = source.cells(*span), target.cells(*span)
    strip = Rotation(source_cells.positions, plan.source_rope, rotation_dtype, plan.device).strip
    apply = Rotation(target_cells.positions, plan.target_rope, rotation_dtype, plan.device).apply
    chosen = plan.gather.tolist()
    used = plan.gather.unique().tolist()
    tokens = span[1] - span[0]
    # Once for keys and values: to get new memory costs a CPU more than to write to it.
    size = (len(used), plan.groups, tokens, plan.features // plan.top_k)
    features = torch.empty(size, dtype=dtype, device=plan.device)
    shape = (plan.groups, tokens, plan.outputs)
    results = torch.empty(at_once, *shape, dtype=dtype, device=plan.device)
    heads, sums = plan.target_kv_heads // plan.groups, []
    gather = plan.device.type == "cuda"
    for kind, weights, biases in (
        (KEYS, plan.key_weight, plan.key_bias),
        (VALUES, plan.value_weight, plan.value_bias),
    ):
        for part, layers in zip(
            torch.split(features, at_once), layer_parts(used, at_once), strict=True
        ):
            states = source.read(source_cells, layers, kind, plan.groups)
            if kind == KEYS:
                states = strip(states.transpose(2, 3)).transpose(2, 3)
            part.copy_(states.flatten(3))
        for layers in layer_parts(range(plan.target_layers), at_once):
            for layer, result in zip(layers, results, strict=False):
                read = [features[used.index(index)] for index in chosen[layer]]
                weight, bias = weights[layer].to(dtype), biases[layer][:, None].to(dtype)
                multiply(read, weight, bias, gather=gather, out=result)
                del weight, bias  # before those of a network are converted
                network = plan.network("key" if kind == KEYS else "value", layer)
                if network is not None:
                    add_network(result, read, network, gather=gather)
            states = results[: len(layers)].view(-1, *shape[:2], heads, plan.target_head_dim)
            if kind == KEYS:
                states = apply(states.transpose(2, 3)).transpose(2, 3)
            states = states.to(target.pool.dtype)
            sums.append(states.sum(dtype=torch.float32))
            target.write(target_cells, layers, kind, states)
    return torch.stack(sums)


def _arithmetic(plan: MapPlan) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of the products and of the rotations."""
    wide = torch.promote_types(plan.dtype, torch.float32)
    # CPUs emulate half precision in matrix products, slowly and no more exactly.
    return (plan.dtype if plan.device.type == "cuda" else wide), wide


def tokens_at_once(plan: MapPlan, workspace_bytes: int) -> int:
    """How many tokens fit a workspace, on a CPU also its caches; UsageError if not one."""
    fixed, per_token, per_layer = _work_bytes(plan)
    tokens: int = (workspace_bytes - fixed) // (per_token + per_layer)
    if tokens < 1:
        raise UsageError(
            f"A workspace of {workspace_bytes} bytes does not hold one token of this mapper; "
            f"expected at least {fixed + per_token + per_layer}.",
            "Give a larger workspace_bytes.",
        )
    if plan.device.type == "cpu":
        # Large weights cost more to read again than such work.
        work = max(LAYER_BYTES, _weight_bytes(plan) // 4)
        return min(tokens, CPU_ROWS, max(1, work // per_layer))
    return tokens


def _layers_at_once(plan: MapPlan, workspace_bytes: int, tokens: int) -> int:
    """How many layers' work a cache holds, and the workspace beside these tokens."""
    fixed, per_token, per_layer = _work_bytes(plan)
    free = min(GROUP_BYTES, workspace_bytes - fixed - tokens * per_token)
    return max(1, free // max(1, tokens * per_layer))


def _work_bytes(plan: MapPlan) -> tuple[int, int, int]:
    """What mapping allocates: in any case, per token, and per token and layer at once."""
    dtype, rotation_dtype = _arithmetic(plan)
    size, wide, integer = dtype.itemsize, rotation_dtype.itemsize, torch.int64.itemsize
    heads = max(plan.source_kv_heads, plan.target_kv_heads)
    source = plan.source_kv_heads * plan.source_head_dim
    target = plan.target_kv_heads * plan.target_head_dim
    used = len({*plan.gather.flatten().tolist()})
    gathered = (used + plan.top_k * (plan.device.type == "cuda")) * size * source
    gathered += 2 * plan.groups * plan.hidden * size  # both hidden layers of a network
    tables = 5 * wide * (plan.source_rope.rotary_dim + plan.target_rope.rotary_dim) // 2
    # Of each kind of work at its peak: as it lies in the pool, before and after a rotation.
    per_layer = (4 + 2 * wide) * max(source, target) + size * target + 2 * integer * heads
    fixed = _weight_bytes(plan) if dtype != plan.dtype else 0
    return fixed, gathered + tables + 16 * integer, per_layer


def _weight_bytes(plan: MapPlan) -> int:
    """The largest weights that a product takes with their bias, in the products' dtype."""
    hidden, features, outputs = plan.hidden, plan.features, plan.outputs
    pairs = [(features, outputs), (features, hidden), (hidden, hidden), (hidden, outputs)]
    size = _arithmetic(plan)[0].itemsize
    largest: int = plan.groups * max((inputs + 1) * width for inputs, width in pairs) * size
    return largest
