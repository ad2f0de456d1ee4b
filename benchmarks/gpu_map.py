"""Times of the kernels, of the whole map, of what they compete with, and of copies."""

import os
from collections.abc import Iterator
from functools import partial

import torch
from gpu_pools import Sizes, filled_cache, first_tokens, random_plan, source_cache
from gpu_timing import Budget, KernelTimes, Row, Timer, Times, row
from kvhub.exporters.map_plan import MapPlan
from kvhub.exporters.paged import map_paged
from kvhub.exporters.paged_cache import PagedCache
from torch import Tensor

from kvhub import ModelSpec
from kvhub.roofline import (
    SCRATCH_BYTES,
    Device,
    cache_bytes,
    map_flops,
    map_time,
    map_weights,
    transfer_time,
)

# To compile four kernels, and to make a mapper and two pools; guesses, only to skip in time.
SET_UP_SECONDS = 45.0
SECONDS_PER_MAP = 15.0
COPY_SECONDS = 30.0
HELD = "device time, launches hidden; L2 flushed before each run"
HOST_SHARE = 0.5  # of the host's free memory: pinned pages are lost to all others


def time_maps(
    sizes: Sizes, roof: Device | None, device: torch.device, budget: Budget, kernels: bool
) -> Iterator[Row]:
    """Gather, multiply, whole map, bare products and plain torch, per kind of heads and length."""
    pair = sizes.specs
    timer = Timer(device, sizes.seconds)
    source, target = _pools(sizes, pair, device)
    for heads in ("all", "matched"):
        if not budget.allows(SET_UP_SECONDS if timer.cuda else 1, f"maps of {heads} heads"):
            continue
        plan = random_plan(pair, heads, sizes.top_k, sizes.dtype, device)
        for tokens in sizes.tokens:
            what = f"map of {heads} heads, {tokens} tokens"
            if not budget.allows(SECONDS_PER_MAP if timer.cuda else 1, what):
                continue
            ends = first_tokens(source, tokens), first_tokens(target, tokens)
            roofline = _Roofline(pair, heads, sizes.top_k, tokens, roof)
            if kernels:
                yield from _time_kernels(timer, plan, *ends, roofline)
            yield _time_products(timer, plan, roofline)
            times = timer.measure(partial(map_paged, plan, *ends), wall=True)
            yield roofline.whole("torch's map_paged", "call to finish", times)
        del plan


def _pools(
    sizes: Sizes, pair: tuple[ModelSpec, ModelSpec], device: torch.device
) -> tuple[PagedCache, PagedCache]:
    shape = (sizes.tokens_per_block, sizes.dtype, (max(sizes.tokens),), (0,), device)
    return source_cache(pair[0], *shape), filled_cache(pair[1], *shape)[0]


class _Roofline:
    """What `kvhub.roofline` expects of one map and of its two kernels."""

    def __init__(
        self,
        pair: tuple[ModelSpec, ModelSpec],
        heads: str,
        top_k: int,
        tokens: int,
        roof: Device | None,
    ) -> None:
        self.heads, self.tokens = heads, tokens
        self.flops = tokens * map_flops(*pair, heads, top_k)
        # As `map_time` counts them: gathered once in and out; each choice read, the target's cache
        # written, and the weights once per chunk of tokens.
        source, target = (tokens * cache_bytes(spec) for spec in pair)
        self.gathered = 2 * source
        chosen = pair[1].num_layers * top_k * source // pair[0].num_layers
        chunks = -(-source // SCRATCH_BYTES)
        self.multiplied = chosen + target + 2 * chunks * map_weights(*pair, heads, top_k)
        self.total = self.gather = self.multiply = None
        if roof is not None:
            time = map_time(*pair, heads, top_k, tokens, roof)
            self.total = time.total
            self.gather = self.gathered / roof.bandwidth
            self.multiply = time.total - self.gather - time.launch

    def whole(self, name: str, setting: str, times: Times) -> Row:
        size = self.gathered + self.multiplied
        amounts = {"expected": self.total, "size": size, "flops": self.flops}
        return row(name, self.heads, self.tokens, setting, times, **amounts)

    def kernel(self, name: str, setting: str, times: Times) -> Row:
        if name == "gather":
            amounts = {"expected": self.gather, "size": self.gathered}
        else:
            amounts = {"expected": self.multiply, "size": self.multiplied, "flops": self.flops}
        return row(f"{name} kernel", self.heads, self.tokens, setting, times, **amounts)

    def products(self, setting: str, times: Times) -> Row:
        # The rate that is assumed of our kernel says nothing of cuBLAS: expected as that.
        amounts = {"expected": self.multiply, "flops": self.flops}
        return row("bare products", self.heads, self.tokens, setting, times, **amounts)


def _time_kernels(
    timer: Timer, plan: MapPlan, source: PagedCache, target: PagedCache, roofline: _Roofline
) -> Iterator[Row]:
    from kvhub.exporters.triton_map import TritonMap

    mapper = TritonMap(plan)
    enqueue = partial(mapper.enqueue, source, target, roofline.tokens)
    kernels = KernelTimes(timer)
    with kernels.watch():
        timer.measure(enqueue, hold=True, kernels=kernels)
    for name in kernels.names:
        times = kernels.times(name)
        if times is not None:
            yield roofline.kernel(name, f"summed over keys, values and chunks; {HELD}", times)
    # Without the events of every launch.
    yield roofline.whole("map", HELD, timer.measure(enqueue, hold=True))
    yield roofline.whole("map, launched", "as a caller's stream sees it", timer.measure(enqueue))
    call = partial(mapper, source, target)
    times = timer.measure(call, wall=True)
    yield roofline.whole("map, called", "with its checks, call to finish", times)


def _time_products(timer: Timer, plan: MapPlan, roofline: _Roofline) -> Row:
    """torch.baddbmm (cuBLAS on a GPU) on features that lie gathered, all tokens at once.

    As many inputs and outputs in turn as L2 does not hold; the weights are the map's own.
    """
    tokens = roofline.tokens
    shape = (plan.groups, tokens, plan.features)
    options = {"dtype": plan.dtype, "device": plan.device}
    size = plan.groups * tokens * plan.features * plan.dtype.itemsize
    held = 2 * torch.cuda.get_device_properties(plan.device).L2_cache_size if timer.cuda else 0
    inputs = [torch.empty(shape, **options).normal_() for _ in range(2 + held // size)]
    results = [torch.empty((*shape[:2], plan.outputs), **options) for _ in inputs]

    def run() -> None:
        number = 0
        for weights, biases in (
            (plan.key_weight, plan.key_bias),
            (plan.value_weight, plan.value_bias),
        ):
            for weight, bias in zip(weights, biases, strict=True):
                place = number % len(inputs)
                torch.baddbmm(bias[:, None], inputs[place], weight, out=results[place])
                number += 1

    setting = f"torch.baddbmm, features gathered before; {HELD}"
    return roofline.products(setting, timer.measure(run, hold=True))


def time_copies(
    sizes: Sizes, roof: Device | None, device: torch.device, budget: Budget
) -> Iterator[Row]:
    """The source's cache from the host, pinned and pageable, and within the device.

    From another GPU it would take a second one: not measured.
    """
    if not budget.allows(COPY_SECONDS if device.type == "cuda" else 1, "copies"):
        return
    source = sizes.specs[0]
    timer = Timer(device, sizes.seconds)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fitting = [t for t in sizes.tokens if t * cache_bytes(source) <= HOST_SHARE * free]
    for tokens in sizes.tokens[len(fitting) :]:
        budget.skip(f"copies of {tokens} tokens from the host: its memory is too small")
    largest = max(sizes.tokens) * cache_bytes(source)
    there, other = (torch.zeros(largest, dtype=torch.uint8, device=device) for _ in range(2))
    for tokens in sizes.tokens:
        size = tokens * cache_bytes(source)
        times = timer.measure(partial(there[:size].copy_, other[:size]))
        # Read and written: twice the bytes that arrive.
        expected = 2 * size / roof.bandwidth if roof else None
        setting = "source cache; bytes that arrive"
        yield row(
            "copy, device to device", None, tokens, setting, times, expected=expected, size=size
        )
    del other
    for name, pinned in (("pinned", True), ("pageable", False)):
        if not fitting:
            continue
        host = _host_buffer(fitting[-1] * cache_bytes(source), pin=pinned and timer.cuda)
        for tokens in fitting:
            size = tokens * cache_bytes(source)
            copy = partial(there[:size].copy_, host[:size], non_blocking=pinned)
            expected = transfer_time(source, tokens, roof, "pcie") if roof and pinned else None
            times = timer.measure(copy, wall=not pinned)
            setting = f"source cache, {name} host memory"
            name_ = f"copy, host to device, {name}"
            yield row(name_, None, tokens, setting, times, expected=expected, size=size)
        del host


def _host_buffer(size: int, *, pin: bool) -> Tensor:
    # Written to, so that its pages exist before they are copied.
    return torch.empty(size, dtype=torch.uint8, pin_memory=pin).fill_(1)
