"""How long a map should take on a GPU, from arithmetic alone, beside prefilling the target again.

A time is the larger of operations over a reached rate and bytes over a reached bandwidth, plus the
launches of kernels. Nothing here is measured: the peaks are NVIDIA's data sheets, the shares of
them are the named assumptions below. docs/roofline.md discusses them; `python -m kvhub.roofline`
prints its tables.
"""

import sys
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, Literal, Protocol

from kvhub.compatibility import Heads
from kvhub.errors import UsageError

__all__ = [
    "DEVICES",
    "H100_SXM",
    "H200",
    "Device",
    "MapTime",
    "ModelShape",
    "Prediction",
    "map_flops",
    "map_time",
    "map_weights",
    "predict",
    "prefill_flops",
    "prefill_time",
    "transfer_time",
]

BYTES = 2  # per number: caches and weights in 16-bit

# Shares of the peak that are assumed to be reached.
PRODUCT_SHARE: dict[Heads, float] = {"all": 0.72, "matched": 0.55}  # fewer outputs, less re-use
PREFILL_SHARE = 0.60  # matrix products and attention of a good prefill
MEMORY_SHARE = 0.80
LINK_SHARE = 0.85

SCRATCH_BYTES = 256 * 2**20  # of keys, then of values, per chunk of tokens; each reads all weights
KERNELS_PER_CHUNK = 4  # gathering and multiplying, for keys and for values
KERNELS_PER_LAYER = 9  # prefill: two norms, four products, rotation, attention, activation


class ModelShape(Protocol):
    """What the arithmetic needs of a model; a `ModelSpec` is one."""

    @property
    def num_layers(self) -> int: ...
    @property
    def attention_heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True)
class Device:
    """A GPU's peaks.

    Attributes
    ----------
    bf16_tflops
        Dense.
    hbm_tbps, nvlink_gbps, pcie_gbps
        Of memory, and of the links in one direction.
    launch_us
        Between two kernels that do nothing.
    """

    name: str
    bf16_tflops: float
    hbm_tbps: float
    nvlink_gbps: float
    pcie_gbps: float
    launch_us: float

    @property
    def flops(self) -> float:
        """Peak operations per second."""
        return 1e12 * self.bf16_tflops

    @property
    def bandwidth(self) -> float:
        """Bytes per second that memory is assumed to reach."""
        return 1e12 * self.hbm_tbps * MEMORY_SHARE


H100_SXM = Device("H100 SXM", 989.4, 3.35, 450.0, 63.0, 5.0)
H200 = Device("H200", 989.4, 4.8, 450.0, 63.0, 5.0)
DEVICES = (H100_SXM, H200)


@dataclass(frozen=True)
class MapTime:
    """Seconds for one map, of which `compute` and `hbm` partly overlap.

    Attributes
    ----------
    compute
        Of the matrix products.
    hbm
        Of all bytes read and written.
    launch
        Of the kernels' launches.
    total
        The gathering pass, then the slower of the products and their bytes, and the launches.
    """

    compute: float
    hbm: float
    launch: float
    total: float


@dataclass(frozen=True)
class Prediction:
    """Seconds for one context: the map, what it competes with, and what comes before it.

    Attributes
    ----------
    map
        On the target's GPU, with the source's cache there.
    nvlink, pcie
        For copying that cache from another GPU or from the host.
    prefill
        What the target needs without a map.
    """

    device: str
    tokens: int
    map: MapTime
    nvlink: float
    pcie: float
    prefill: float

    @property
    def share(self) -> float:
        """The map's part of a prefill."""
        return self.map.total / self.prefill

    @property
    def gain(self) -> float:
        """Prefill over the map and a copy through NVLink."""
        return self.prefill / (self.map.total + self.nvlink)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share, "gain": self.gain}


def cache_bytes(shape: ModelShape) -> int:
    """Bytes that one token takes in a cache."""
    return 2 * shape.num_layers * shape.kv_heads * shape.head_dim * BYTES


def map_weights(source: ModelShape, target: ModelShape, heads: Heads, top_k: int) -> int:
    """Numbers in a mapper's matrices: each token is multiplied with each of them once."""
    if not 1 <= top_k <= source.num_layers:
        raise UsageError(
            f"Expected 1 to {source.num_layers} source layers per target layer, found {top_k}.",
            "Give another --top-k.",
        )
    groups = 1 if heads == "all" else target.kv_heads
    features = top_k * source.kv_heads * source.head_dim // groups
    return 2 * target.num_layers * features * target.kv_heads * target.head_dim


def map_flops(source: ModelShape, target: ModelShape, heads: Heads, top_k: int) -> int:
    """Operations of the matrix products per token."""
    return 2 * map_weights(source, target, heads, top_k)


def map_time(
    source: ModelShape, target: ModelShape, heads: Heads, top_k: int, tokens: int, device: Device
) -> MapTime:
    """Predict a map of `tokens` tokens by two kernels per chunk: gather, then multiply.

    The first reads the source's cache and writes it without RoPE to scratch. The second reads, for
    each target layer, the weights and its k source layers once, as if the device's cache kept
    nothing from one target layer to the next, and writes the target's cache.

    Raises
    ------
    UsageError
        There are no tokens, or not as many source layers.
    """
    _require_tokens(tokens)
    chunks = ceil(tokens * cache_bytes(source) / 2 / SCRATCH_BYTES)
    weights = map_weights(source, target, heads, top_k)
    compute = tokens * 2 * weights / (device.flops * PRODUCT_SHARE[heads])
    gathered = 2 * tokens * cache_bytes(source)
    features = target.num_layers * top_k * cache_bytes(source) // source.num_layers
    multiplied = tokens * (features + cache_bytes(target)) + chunks * BYTES * weights
    gather, product_bytes = gathered / device.bandwidth, multiplied / device.bandwidth
    launch = 1e-6 * device.launch_us * KERNELS_PER_CHUNK * chunks
    total = gather + max(compute, product_bytes) + launch
    return MapTime(compute, gather + product_bytes, launch, total)


def transfer_time(
    source: ModelShape, tokens: int, device: Device, link: Literal["nvlink", "pcie"]
) -> float:
    """Predict the seconds to copy the source's cache of `tokens` tokens to the target's GPU."""
    _require_tokens(tokens)
    peak = device.nvlink_gbps if link == "nvlink" else device.pcie_gbps
    return tokens * cache_bytes(source) / (1e9 * peak * LINK_SHARE)


def prefill_flops(target: ModelShape, parameters: int, tokens: int) -> int:
    """Operations of a prefill: two per weight and token, and attention to all earlier tokens.

    Attention is two products per head and pair of tokens, of which causality leaves half.
    """
    attention = 2 * target.num_layers * target.attention_heads * target.head_dim
    return 2 * parameters * tokens + attention * tokens**2


def prefill_time(target: ModelShape, parameters: int, tokens: int, device: Device) -> float:
    """Predict the seconds of a prefill on one device, whether or not the model fits there.

    Parameters
    ----------
    target, tokens, device
        What reads how many tokens where.
    parameters
        The weights that a token is multiplied with; an embedding is only looked up.
    """
    _require_tokens(tokens)
    compute = prefill_flops(target, parameters, tokens) / (device.flops * PREFILL_SHARE)
    weights = BYTES * parameters / device.bandwidth
    # A GPU works while the next kernels are launched, so these count only where they are slower.
    launches = 1e-6 * device.launch_us * KERNELS_PER_LAYER * target.num_layers
    return max(compute, weights, launches)


def predict(
    source: ModelShape,
    target: ModelShape,
    heads: Heads,
    top_k: int,
    parameters: int,
    tokens: int,
    device: Device,
) -> Prediction:
    """Predict all times for one context; parameters as above."""
    return Prediction(
        device=device.name,
        tokens=tokens,
        map=map_time(source, target, heads, top_k, tokens, device),
        nvlink=transfer_time(source, tokens, device, "nvlink"),
        pcie=transfer_time(source, tokens, device, "pcie"),
        prefill=prefill_time(target, parameters, tokens, device),
    )


def _require_tokens(tokens: int) -> None:
    if tokens < 1:
        raise UsageError(
            f"Expected a context of 1 token or more, found {tokens}.", "Give another length."
        )


@dataclass(frozen=True)
class _Published:
    num_layers: int
    attention_heads: int
    kv_heads: int
    head_dim: int


QWEN3_14B = _Published(40, 40, 8, 128)
QWEN3_32B = _Published(64, 64, 8, 128)
# Per layer: queries and output, keys and values, and the three matrices of the MLP.
QWEN3_32B_WEIGHTS = 64 * (2 * 5120 * 8192 + 2 * 5120 * 1024 + 3 * 5120 * 25600)
TOP_K = 8
# arXiv 2608.03893, Qwen3-14B to 32B: tokens, map with copy, prefill; milliseconds.
PAPER = ((8192, 67.8, 1154.8), (32768, 277.6, 6975.3))
# FlashAttention-2, which the paper uses, on an H100: arXiv 2407.08608, abstract.
FLASH_ATTENTION_2_SHARE = 0.35
# Reads and writes of its operand that a rotation takes as x * cos + rotate_half(x) * sin, one
# kernel for each: half, negated; concatenated; two products; their sum.
ROTATION_PASSES = 10


def _markdown(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.{0 if seconds >= 1 else 1 if seconds >= 0.01 else 2}f}"


def predictions_table() -> str:
    """Qwen3-14B to 32B over devices, heads and context lengths."""
    rows: list[tuple[Any, ...]] = []
    for device in DEVICES:
        for heads, tokens in [(h, t) for h in PRODUCT_SHARE for t in (512, 2048, 8192, 32768)]:
            found = predict(QWEN3_14B, QWEN3_32B, heads, TOP_K, QWEN3_32B_WEIGHTS, tokens, device)
            times = (found.map.compute, found.map.hbm, found.map.launch, found.map.total)
            more = (found.nvlink, found.pcie, found.prefill)
            share = f"{100 * found.share:.2f} %"
            rows.append((device.name, heads, tokens, *map(_ms, (*times, *more)), share))
    names = ("device", "heads", "tokens", "products", "memory", "launches", "**map**")
    return _markdown((*names, "NVLink", "PCIe", "prefill", "map / prefill"), rows)


def paper_table() -> str:
    """The paper's times beside these, and the rate at which its prefill's products ran."""
    rows: list[tuple[Any, ...]] = []
    for tokens, mapped, prefilled in PAPER:
        found = predict(QWEN3_14B, QWEN3_32B, "all", TOP_K, QWEN3_32B_WEIGHTS, tokens, H100_SXM)
        products = 2 * QWEN3_32B_WEIGHTS * tokens
        operations = prefill_flops(QWEN3_32B, QWEN3_32B_WEIGHTS, tokens)
        attention = (operations - products) / (H100_SXM.flops * FLASH_ATTENTION_2_SHARE)
        rates = (operations / prefilled, products / (prefilled - 1e3 * attention))
        shares = (f"{100 * 1e3 * rate / H100_SXM.flops:.0f} %" for rate in rates)
        copied = _ms(found.map.total + found.nvlink)
        rows.append((tokens, mapped, copied, prefilled, _ms(found.prefill), *shares))
    names = ("tokens", "paper: copy and map", "here", "paper: prefill", "here")
    return _markdown((*names, "paper: share of peak", "of its products alone"), rows)


def eager_table() -> str:
    """Microseconds per token of the same map as separate kernels, each through memory."""
    keys = QWEN3_14B.kv_heads * QWEN3_14B.head_dim * BYTES  # of a token in a layer of either model
    layers = {"source": QWEN3_14B.num_layers, "target": QWEN3_32B.num_layers}
    chosen = TOP_K * layers["target"]
    flops = map_flops(QWEN3_14B, QWEN3_32B, "all", TOP_K)
    product = flops / (H100_SXM.flops * PRODUCT_SHARE["all"])
    copy = transfer_time(QWEN3_14B, 1, H100_SXM, "nvlink")
    gather = 2 * 2 * chosen * keys / H100_SXM.bandwidth
    rotate, once, each = (
        ROTATION_PASSES * count * keys / H100_SXM.bandwidth
        for count in (layers["target"], layers["source"], chosen)
    )
    steps = {
        "copy through NVLink": (copy, copy),
        "source RoPE off: once per source layer, or once per choice": (once, each),
        "chosen layers side by side: read and written": (gather, gather),
        "matrix products": (product, product),
        "target RoPE on": (rotate, rotate),
    }
    sums = tuple(sum(column) for column in zip(*steps.values(), strict=True))
    paper = tuple(1e-3 * mapped / tokens for tokens, mapped, _ in PAPER)
    rows = [*steps.items(), ("sum", sums), ("paper, at 8192 and at 32768 tokens", paper)]
    return _markdown(
        ("step", "least", "most"),
        [(name, *(f"{1e6 * seconds:.2f}" for seconds in pair)) for name, pair in rows],
    )


def main() -> None:
    """Print the tables of docs/roofline.md."""
    sys.stdout.write("\n".join((predictions_table(), paper_table(), eager_table())))


if __name__ == "__main__":
    main()
