"""What `gpu.py` requires of the kernels before it times them: their numbers, and no others.

A check's error is compared with what rounding allows:

- the result is rounded once, to the target's dtype: eps / 2 of it;
- a sum of n products in float32 is off by at most n 2^-24 of the sum of their magnitudes, whatever
  the order, and tensor cores may cut bits off where a CPU rounds: the same bound with 2^-23;
- content keys are rounded to the mapper's dtype, and a last bit of float32 (contracted products)
  decides few of these roundings otherwise: eps / 64 of the sum of magnitudes, where features of
  one in 64 all rounded otherwise would be the bound;
- a rotation adds the errors of two dims, times its attention scaling.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import torch
from gpu_pools import (
    FILL,
    PARTIAL,
    PLAIN,
    SCALED,
    Sizes,
    filled_cache,
    places,
    positions,
    random_plan,
    source_cache,
)
from kvhub.exporters.map_plan import MapPlan
from kvhub.exporters.paged import map_paged
from kvhub.exporters.paged_cache import PagedCache
from torch import Tensor

from kvhub import ModelSpec, console
from kvhub.rope import Rotation

LENGTHS, STARTS = (9, 0, 1, 131), ((0, 5, 7000, 30000), (3, 0, 7000, 11))
LARGE_STARTS = (0, 3, 0, 30000)
SUM_ERROR, FLIPPED = 2.0**-23, 2.0**-6
HALF = (torch.bfloat16, torch.float16)
# Against map_paged, which also rounds a product before its rotation: two more roundings of the
# dims of a pair, bounded by the head's largest. The rest is sums and flipped roundings of content
# keys, each 1e-4 of the numbers' size, so a 64th is ample; another layer, head, token or position
# is off by the numbers' size itself. On average, roundings are a third of eps.
LARGE_SLACK = 2.0**-6
MiB = 2**20


@dataclass(frozen=True)
class Case:
    """A small map: models, mapper and pools."""

    name: str
    heads: str
    dtype: torch.dtype
    source: dict
    target: dict
    top_k: int
    blocks: tuple[int, int]
    pools: tuple[torch.dtype, torch.dtype]
    padded: bool
    workspace_bytes: int


@dataclass(frozen=True)
class Check:
    """A finding.

    Attributes
    ----------
    name
        What ran on which models, and what it was compared with.
    largest_error, largest_share
        Of a number, and of what was allowed for it.
    relative_rms
        Of all errors, over that of the numbers.
    untouched
        Every other cell of the pool, and the buffer around it, is what it was.
    """

    name: str
    heads: str
    dtype: str
    tokens: int
    largest_error: float
    largest_share: float
    relative_rms: float
    untouched: bool
    passed: bool

    def to_dict(self) -> dict[str, object]:
        # A NaN is no JSON, and the most likely one is a number that the kernels got wrong.
        return {
            key: None if isinstance(value, float) and not value < float("inf") else value
            for key, value in asdict(self).items()
        }


Engine = Callable[[MapPlan, PagedCache, PagedCache, int], object]


def run_triton(
    plan: MapPlan, source: PagedCache, target: PagedCache, workspace_bytes: int
) -> object:
    from kvhub.exporters.triton_map import TritonMap

    TritonMap(plan, workspace_bytes=workspace_bytes)(source, target)


def run_torch(
    plan: MapPlan, source: PagedCache, target: PagedCache, workspace_bytes: int
) -> object:
    map_paged(plan, source, target, workspace_bytes=workspace_bytes)


def small_cases(sizes: Sizes) -> list[Case]:
    """Odd sizes, several chunks of tokens, every feature of the kernels; few compilations."""
    cases = []
    scaled = {**SCALED, "num_hidden_layers": 3}, {**PARTIAL, "num_hidden_layers": 4}
    for heads in ("all", "matched"):
        for dtype in HALF:
            cases.append(
                Case(
                    *("scaled to partial and interleaved", heads, dtype, *scaled, 2, (4, 8)),
                    *((dtype, dtype), True, MiB // 2),
                )
            )
    wide = (
        {**PLAIN, "head_dim": 128, "num_hidden_layers": 10},
        {**PLAIN, "head_dim": 128, "num_hidden_layers": 3},
    )
    for heads, dtype in zip(("all", "matched"), HALF, strict=True):
        # Nine layers do not fit one packed number of slots.
        cases.append(
            Case(
                *("nine layers, other dtypes", heads, dtype, *wide, 9, (16, 4)),
                *((torch.float32, torch.float32), False, 2 * MiB),
            )
        )
    if sizes.source["head_dim"] == 128:
        # The shapes that are timed later, so nothing is compiled for these alone.
        real = (
            {**sizes.source, "num_hidden_layers": 9},
            {**sizes.target, "num_hidden_layers": 3},
        )
        size = sizes.tokens_per_block
        for heads in ("all", "matched"):
            cases.append(
                Case(
                    *("real heads", heads, sizes.dtype, *real, sizes.top_k, (size, size)),
                    *((sizes.dtype, sizes.dtype), False, 4 * MiB),
                )
            )
    return cases


def correctness(sizes: Sizes, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> list[Check]:
    """Run every check; `dtypes` are those in which the kernels run here."""
    # For these, half precision must not be what cuBLAS adds its partial sums in.
    settings = torch.backends.cuda.matmul
    reduced = settings.allow_bf16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = False
    try:
        checks = []
        for case in small_cases(sizes):
            checks.append(_small(case, "map_paged", run_torch, device))
            if case.dtype in dtypes:
                checks.append(_small(case, "kernels", run_triton, device))
        if sizes.dtype in dtypes:
            checks += [_large(sizes, heads, device) for heads in ("all", "matched")]
        return checks
    finally:
        settings.allow_bf16_reduced_precision_reduction = reduced


def _small(case: Case, name: str, engine: Engine, device: torch.device) -> Check:
    pair = ModelSpec.from_config(case.source), ModelSpec.from_config(case.target)
    plan = random_plan(pair, case.heads, case.top_k, case.dtype, device)
    source = source_cache(
        *(pair[0], case.blocks[0], case.pools[0], LENGTHS, STARTS[0], device), padded=case.padded
    )
    target, buffer = filled_cache(
        *(pair[1], case.blocks[1], case.pools[1], LENGTHS, STARTS[1], device), padded=case.padded
    )
    # On a CPU, plain torch also keeps a layer's weights as float32 there.
    factor = 16 if engine is run_torch else 1
    engine(plan, source, target, factor * case.workspace_bytes)
    # A CPU multiplies in float32; everything else rounds content keys to the mapper's dtype.
    wide = engine is run_torch and device.type == "cpu"
    content = torch.float32 if wide else plan.dtype
    product = plan.dtype if engine is run_torch and not wide else torch.float64
    measure = _Errors(target)
    for layer, (expected, magnitudes) in enumerate(_in_float64(plan, source, target, content)):
        allowed = torch.finfo(target.pool.dtype).eps / 2 * expected.abs()
        allowed += torch.finfo(product).eps * expected.abs().amax(-1, keepdim=True)
        share = SUM_ERROR * plan.features + FLIPPED * torch.finfo(content).eps
        allowed += share * magnitudes + torch.finfo(target.pool.dtype).smallest_normal
        measure.add(layer, expected, allowed)
    return measure.check(
        f"{name} against float64: {case.name}", case.heads, plan.dtype, buffer, limit=None
    )


def _in_float64(
    plan: MapPlan, source: PagedCache, target: PagedCache, content: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """Per target layer the map of all tokens, and bounds on the magnitudes that it sums.

    Both `[2, kv_heads, tokens, head_dim]` float64. The equation of `KVMapper`, written once more.
    """
    blocks, slots = places(source)
    # [tokens, layers, 2, kv_heads, head_dim] -> [2, layers, kv_heads, tokens, head_dim]
    states = source.pool[blocks, :, :, :, slots].float().permute(2, 1, 3, 0, 4).contiguous()
    strip = Rotation(positions(source), plan.source_rope, device=plan.device)
    states[0] = strip.strip(states[0])
    states = states.to(content).double()
    turn = Rotation(positions(target), plan.target_rope, torch.float64, plan.device)
    growth = 2 * max(1.0, plan.target_rope.attention_scaling)
    for layer, chosen in enumerate(plan.gather.tolist()):
        # [2, top_k, kv_heads, tokens, head_dim] -> [2, groups, tokens, features]
        parts = states[:, chosen].unflatten(2, (plan.groups, -1))
        features = parts.permute(0, 2, 4, 1, 3, 5).flatten(3)
        weight, bias = (
            torch.stack([tensors[layer] for tensors in pair]).double()
            for pair in ((plan.key_weight, plan.value_weight), (plan.key_bias, plan.value_bias))
        )
        results = [
            product.unflatten(-1, (-1, plan.target_head_dim)).transpose(2, 3).flatten(1, 2)
            for product in (
                features @ weight + bias[:, :, None],
                features.abs() @ weight.abs() + bias[:, :, None].abs(),
            )
        ]
        expected, magnitudes = results
        expected[0] = turn.apply(expected[0])
        magnitudes[0] = growth * magnitudes[0].amax(-1, keepdim=True)
        yield expected, magnitudes


def _large(sizes: Sizes, heads: str, device: torch.device) -> Check:
    """At full size, where no float64 fits: the kernels against plain torch."""
    pair = sizes.specs
    lengths, starts = sizes.large
    plan = random_plan(pair, heads, sizes.top_k, sizes.dtype, device)
    shape = (sizes.tokens_per_block, sizes.dtype, lengths)
    source = source_cache(pair[0], *shape, starts, device)
    target, buffer = filled_cache(pair[1], *shape, LARGE_STARTS, device)
    run_triton(plan, source, target, 256 * MiB)
    other = replace(target, pool=torch.zeros_like(target.pool))
    run_torch(plan, source, other, 256 * MiB)
    measure = _Errors(target)
    eps = torch.finfo(sizes.dtype).eps
    blocks, slots = places(other)
    for layer in range(plan.target_layers):
        expected = other.pool[:, layer][blocks, :, :, slots].permute(1, 2, 0, 3).float()
        allowed = eps * (expected.abs() + expected.abs().amax(-1, keepdim=True))
        allowed += LARGE_SLACK * expected.square().mean().sqrt()
        measure.add(layer, expected, allowed)
    return measure.check(
        "kernels against map_paged: full size", heads, plan.dtype, buffer, limit=eps / 2
    )


class _Errors:
    """Compares a target cache with what is expected, and empties the cells that it has seen."""

    def __init__(self, target: PagedCache) -> None:
        self.target, self.places = target, places(target)
        self.error = self.share = self.square = self.expected_square = 0.0
        self.fits = True

    def add(self, layer: int, expected: Tensor, allowed: Tensor) -> None:
        """Take one layer, `[2, kv_heads, tokens, head_dim]`."""
        blocks, slots = self.places
        cells = self.target.pool[:, layer]
        found = cells[blocks, :, :, slots].permute(1, 2, 0, 3).to(expected.dtype)
        errors = (found - expected).abs()
        # Not (errors > allowed).any(): a NaN is no match.
        self.fits &= bool((errors <= allowed).all())
        self.error = max(self.error, float(errors.max()))
        self.share = max(self.share, float((errors / allowed).max()))
        self.square += float(errors.square().sum(dtype=torch.float64))
        self.expected_square += float(expected.square().sum(dtype=torch.float64))
        cells[blocks, :, :, slots] = FILL

    def check(
        self, name: str, heads: str, dtype: torch.dtype, buffer: Tensor, limit: float | None
    ) -> Check:
        """Conclude; `limit` is what the errors' relative root mean square may be."""
        untouched = all(bool((part == FILL).all()) for part in buffer.split(256))
        rms = (self.square / self.expected_square) ** 0.5
        passed = self.fits and untouched and (limit is None or rms <= limit)
        tokens = len(self.places[0])
        console.say(
            f"{'ok  ' if passed else 'FAIL'} {name}, {heads}, {dtype}: {self.share:.2f} of the "
            f"error allowed{'' if untouched else ', and other cells were written'}"
        )
        numbers = (self.error, self.share, rms)
        return Check(name, heads, str(dtype), tokens, *numbers, untouched, passed)
