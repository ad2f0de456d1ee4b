"""The map of an exported directory against the equation, on small pools laid out as an engine's.

What is compared with is computed here, in float64 and by itself: the equation, one target layer
after the other, and where a cell lies in a pool, as a number in flat memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from kvhub.exporters.map_plan import MapPlan, RopeTable
from kvhub.exporters.paged import map_paged
from kvhub.exporters.paged_cache import PagedCache
from kvhub.exporters.serving import DTYPES, Settings
from kvhub.exporters.triton_map import TritonMap
from torch import Tensor

from kvhub.errors import VerificationError

__all__ = ["check_map", "mapping_of"]

FILL = 7.25  # in every dtype
GUARD = 4096  # numbers in front of and behind a pool
TOKENS_PER_BLOCK = 32
SPARE_BLOCKS = 3
FAR = 30000
# In resolutions of the coarser of the weights' and the pool's dtype. Rounding a result costs half
# of one; the kernels also round content keys, which costs up to one and a half more in the worst
# of millions of numbers. What is wrong is off by tens and more.
TOLERANCE = 4
KINDS = ("keys", "values")

Mapping = Callable[[PagedCache, PagedCache], None]


def mapping_of(plan: MapPlan, workspace_bytes: int, *, kernels: bool) -> Mapping:
    """The map as the connector calls it.

    Raises
    ------
    UsageError
        Triton's kernels do not run here, or not with this plan.
    """
    if kernels:
        if plan.device.type == "cpu":  # as read, tensors lie where the file has them: unaligned
            plan = replace(plan, value_weight=plan.value_weight.clone())
        mapping: Mapping = TritonMap(plan, workspace_bytes=workspace_bytes)
        return mapping
    return lambda source, target: map_paged(plan, source, target, workspace_bytes=workspace_bytes)


def check_map(plan: MapPlan, settings: Settings, mapping: Mapping) -> str:
    """Map random states of a few tokens, all layers and heads, and look at the whole pool.

    Parameters
    ----------
    plan
        Of a rank of the target's engine.
    settings
        Whose dtypes and chunks.
    mapping
        What `mapping_of` gave.

    Raises
    ------
    VerificationError
        A number is not what the equation gives, or a cell was written that is no token's.
    """
    # float8 pools are converted before and after the map.
    source_dtype, target_dtype = (
        plan.dtype if DTYPES[name] == torch.float8_e4m3fn else DTYPES[name]
        for name in (settings.source_kv_dtype, settings.target_kv_dtype)
    )
    chunk = settings.chunk_tokens
    lengths, starts = [2 * chunk + 5, chunk], [0, FAR]
    source = Pool(plan, "source", lengths, chunk, source_dtype)
    target = Pool(plan, "target", lengths, TOKENS_PER_BLOCK, target_dtype)
    source.pool.fill_(float("nan"))  # nobody may read what holds no token
    states = torch.randn(source.shape, generator=torch.Generator().manual_seed(0))
    states = states.to(plan.device, source_dtype)
    source.write(states)
    mapping(source.cache(starts), target.cache(starts))
    positions = torch.cat(
        [start + torch.arange(length) for start, length in zip(starts, lengths, strict=True)]
    ).to(plan.device)
    # Sums of many products are rounded at every step, which shows in float32 only.
    summed = max(plan.features, plan.hidden) ** 0.5 * torch.finfo(torch.float32).eps
    resolution = max(summed, *(torch.finfo(dtype).eps for dtype in (plan.dtype, target_dtype)))
    worst = _compare(plan, states.double(), positions, target.read(), resolution)
    target.write(torch.full(target.shape, FILL, dtype=target_dtype, device=plan.device))
    if not bool((target.buffer == FILL).all()):
        raise VerificationError(
            f"Expected only the cells of {sum(lengths)} tokens to be written, found others "
            "changed.",
            "Do not serve with this directory here.",
        )
    return (
        f"{plan.target_layers} layers, {plan.target_kv_heads} KV heads on {plan.device}: at most "
        f"{worst:.2g} of {TOLERANCE} allowed rounding steps from the equation, no other cell "
        "touched"
    )


class Pool:
    """A pool as an engine has it, in the middle of a buffer full of `FILL`.

    `[blocks, layers, 2, kv_heads * tokens_per_block * head_dim]`, its blocks in a random order;
    `read` and `write` address its tokens in flat memory.
    """

    def __init__(
        self,
        plan: MapPlan,
        side: str,
        lengths: Sequence[int],
        tokens_per_block: int,
        dtype: torch.dtype,
    ) -> None:
        layers, heads, head_dim = (
            getattr(plan, f"{side}_{name}") for name in ("layers", "kv_heads", "head_dim")
        )
        counts = [-(-length // tokens_per_block) for length in lengths]
        blocks = sum(counts) + SPARE_BLOCKS
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).tolist()
        rows = [[order.pop() for _ in range(count)] for count in counts]
        self.table = [row + [-1] * (max(counts) - len(row)) for row in rows]
        self.lengths = list(lengths)
        self.shape = (layers, 2, heads, sum(lengths), head_dim)
        size = blocks * layers * 2 * heads * tokens_per_block * head_dim
        self.buffer = torch.full((size + 2 * GUARD,), FILL, dtype=dtype, device=plan.device)
        self.flat = self.buffer[GUARD:-GUARD].view(-1, head_dim)
        raw = self.flat.view(blocks, layers, 2, heads * tokens_per_block * head_dim)
        self.pool = raw.view(*raw.shape[:3], heads, tokens_per_block, head_dim)
        places = [
            (row[token // tokens_per_block], token % tokens_per_block)
            for row, length in zip(rows, lengths, strict=True)
            for token in range(length)
        ]
        block, slot = torch.tensor(places).T
        layer = torch.arange(layers).view(-1, 1, 1, 1)
        kind, head = torch.arange(2).view(-1, 1, 1), torch.arange(heads).view(-1, 1)
        place = (((block * layers + layer) * 2 + kind) * heads + head) * tokens_per_block + slot
        self.place = place.to(plan.device)

    def read(self) -> Tensor:
        """`[layers, 2, kv_heads, tokens, head_dim]`, a copy."""
        return self.flat[self.place]

    def write(self, states: Tensor) -> None:
        """The inverse of `read`."""
        self.flat[self.place] = states

    def cache(self, starts: Sequence[int]) -> PagedCache:
        device = self.pool.device
        return PagedCache(
            pool=self.pool,
            block_table=torch.tensor(self.table, dtype=torch.int32, device=device),
            lengths=torch.tensor(self.lengths, device=device),
            start_positions=torch.tensor(starts, device=device),
        )


def _compare(
    plan: MapPlan, states: Tensor, positions: Tensor, found: Tensor, resolution: float
) -> float:
    """The largest error, in resolutions of a number as large as it or as is usual in its layer."""
    worst = 0.0
    content = states.clone()
    for layer in range(plan.source_layers):
        content[layer, 0] = _turn(states[layer, 0], positions, plan.source_rope, strip=True)
    for layer in range(plan.target_layers):
        expected = _equation(plan, content, positions, layer)
        usual = expected.square().mean((1, 2, 3), keepdim=True).sqrt()
        errors = (found[layer].double() - expected).abs() / (expected.abs() + usual) / resolution
        for kind, error in zip(KINDS, errors, strict=True):
            largest = float(error.max())
            if not largest <= TOLERANCE:
                head, token, _ = (~(error < largest)).nonzero()[0].tolist()
                raise VerificationError(
                    f"Expected the {kind} of target layer {layer} within {TOLERANCE} rounding "
                    f"steps of the equation, found {largest:.3g} at KV head {head}, token {token}.",
                    "Do not serve with this directory here.",
                )
            worst = max(worst, largest)
    return worst


def _equation(plan: MapPlan, content: Tensor, positions: Tensor, layer: int) -> Tensor:
    """What one target layer must hold, `[2, kv_heads, tokens, head_dim]`."""
    chosen = plan.gather[layer].tolist()
    heads = plan.source_kv_heads // plan.groups
    kinds = []
    for kind, name in enumerate(("key", "value")):
        weight, bias = (
            getattr(plan, f"{name}_{part}")[layer].double() for part in ("weight", "bias")
        )
        outputs = []
        for group in range(plan.groups):
            read = range(group * heads, (group + 1) * heads)
            features = torch.cat(
                [content[source, kind, head] for source in chosen for head in read], -1
            )
            output = features @ weight[group] + bias[group]
            network = plan.network(name, layer)
            if network is not None:
                parts = [part[group].double() for part in network]
                hidden = (features @ parts[0] + parts[1]).clamp(min=0)
                hidden = (hidden @ parts[2] + parts[3]).clamp(min=0)
                output = output + hidden @ parts[4] + parts[5]
            outputs.append(output)
        result = torch.cat(outputs, -1).view(len(positions), plan.target_kv_heads, -1)
        result = result.transpose(0, 1)
        if kind == 0:
            result = _turn(result, positions, plan.target_rope, strip=False)
        kinds.append(result)
    return torch.stack(kinds)


def _turn(keys: Tensor, positions: Tensor, rope: RopeTable, *, strip: bool) -> Tensor:
    """Pairs as complex numbers, times or divided by a e^(i p w)."""
    angles = (positions.float()[:, None] * rope.inv_freq.float()).double()
    factor = torch.polar(torch.full_like(angles, rope.attention_scaling), angles)
    rotating, rest = keys[..., : rope.rotary_dim], keys[..., rope.rotary_dim :]
    shape = (-1, 2) if rope.interleaved else (2, -1)
    pairs = rotating.reshape(*keys.shape[:-1], *shape)
    if not rope.interleaved:
        pairs = pairs.transpose(-1, -2)
    numbers = torch.view_as_complex(pairs.contiguous())
    numbers = numbers / factor if strip else numbers * factor
    pairs = torch.view_as_real(numbers)
    if not rope.interleaved:
        pairs = pairs.transpose(-1, -2)
    return torch.cat([pairs.flatten(-2), rest], -1)
