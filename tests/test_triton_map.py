"""The Triton kernels, as Triton's interpreter runs them, against the equation in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import triton_interpreter  # noqa: F401
from kvhub.exporters.paged import map_paged
from kvhub.exporters.plan import make_plan
from kvhub.exporters.triton_map import TritonMap
from mapping import random_mapper
from pages import BAD, FILL, cell, changed, dense, fill_source, layers_first, mapper_of, paged
from tiny import tiny_config

from kvhub import ModelSpec
from kvhub.errors import UsageError, VerificationError
from kvhub.rope import Rotation, apply_rope

# numpy, which interprets, tells of infinities and NaN; the kernels tell of them too.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{what}:RuntimeWarning")
    for what in ("invalid value", "overflow encountered")
]

DTYPES = [torch.bfloat16, torch.float16]
HEAD_DIMS = [
    *((size, dtype) for size in (64, 128) for dtype in DTYPES),
    (32, torch.bfloat16),
    (256, torch.float16),
]
ROPES = [
    ("qwen3", "llama"),
    ("llama", "arcee"),  # attention scaling
    ("arcee", "glm4"),  # partial and interleaved
    ("cohere", "stablelm"),  # interleaved; partial
    ("glm4", "qwen3"),
]
WORKSPACE = 2**21


@triton.jit
def dot_kernel(left, right, out, SIZE: tl.constexpr):
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    place = rows * SIZE + columns
    product = tl.dot(tl.load(left + place), tl.load(right + place))
    tl.store(out + place, product)


@triton.jit
def round_kernel(numbers, out, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(out + place, tl.load(numbers + place).to(tl.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_interpreter_multiplies(dtype):
    left, right = (torch.randn(64, 64).to(dtype) for _ in range(2))
    out = torch.empty(64, 64)
    dot_kernel[(1,)](left, right, out, SIZE=64)
    torch.testing.assert_close(out, (left.double() @ right.double()).float(), rtol=1e-5, atol=1e-4)


def test_the_interpreter_rounds_to_the_nearest():
    bits = np.random.default_rng(0).integers(0, 2**31, 4096, dtype=np.uint32)
    numbers = torch.from_numpy(bits.view(np.float32)).nan_to_num(0.0, 3e38, -3e38)
    out = torch.empty(4096, dtype=torch.bfloat16)
    round_kernel[(1,)](numbers, out, SIZE=4096)
    assert torch.equal(out, numbers.bfloat16())


def equation(mapper, source, row, target):
    """What a row maps to, `[layers, 2, kv_heads, tokens, head_dim]` float64.

    As the kernels read: content keys rounded to the weights' dtype. All else is exact.
    """
    config = mapper.config
    states, positions = dense(source, row)
    there = positions - source.start_positions[row] + target.start_positions[row]
    strip = Rotation(positions, config.source.require_rope())
    heads = range(config.source.kv_heads)
    groups = [[*heads]] if config.heads == "all" else [[head] for head in heads]
    layers = []
    for layer, chosen in enumerate(config.selection):
        for kind in ("keys", "values"):
            read = [getattr(states.layers[index], kind) for index in chosen]
            if kind == "keys":
                read = [strip.strip(keys) for keys in read]
            read = [part[0].to(mapper.key_weight.dtype).double() for part in read]
            weight, bias = (
                getattr(mapper, f"{kind[:-1]}_{part}")[layer].double()
                for part in ("weight", "bias")
            )
            products = [
                torch.cat([part[head] for part in read for head in group], -1) @ weight[number]
                + bias[number]
                for number, group in enumerate(groups)
            ]
            result = torch.cat(products, -1).unflatten(-1, (config.target.kv_heads, -1))
            result = result.transpose(0, 1)
            if kind == "keys":
                result = apply_rope(result, there, config.target.require_rope())
            layers.append(result)
    return torch.stack(layers).unflatten(0, (-1, 2))


def assert_maps(mapper, source, target):
    """Every token is what the equation makes of it, and every other cell is `FILL`."""
    resolution = torch.finfo(target.pool.dtype).eps
    errors, sizes = [], []
    for row, length in enumerate(source.lengths.tolist()):
        if not length:
            continue
        expected = equation(mapper, source, row, target)
        found = torch.stack([cell(target, row, token) for token in range(length)], 3)
        for token in range(length):
            cell(target, row, token).fill_(FILL)
        errors.append((found.double() - expected).abs().flatten())
        sizes.append(expected.abs().flatten())
    assert bool((target.pool == FILL).all())
    error, size = torch.cat(errors), torch.cat(sizes)
    # Rounding a result costs half the resolution, summing in float32 nearly nothing. A content key
    # on the edge between two numbers may be rounded to either one, if cos and sin are multiplied
    # in another order: few are, and each moves a result by its resolution times a weight.
    beyond = error - resolution / 2 * size - 1e-5
    assert float((beyond > 0).double().mean()) < 2e-3
    assert float(beyond.max()) < 8 * resolution


def random_pages(mapper, tokens_per_block, lengths, starts, dtype):
    pages = paged(mapper.config.source, tokens_per_block[0], dtype, lengths, starts)
    mapped = paged(mapper.config.target, tokens_per_block[1], dtype, lengths, starts)
    return fill_source(pages), mapped


def map_triton(mapper, pages, mapped):
    TritonMap(make_plan(mapper), workspace_bytes=WORKSPACE)(pages, mapped)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", ["all", "matched"])
@pytest.mark.parametrize(("source", "target"), ROPES)
def test_every_rope(source, target, heads, dtype):
    mapper = mapper_of(source, target, heads, dtype=dtype)
    pages, mapped = random_pages(mapper, (4, 8), [9, 0, 1, 21], [0, 5, 7000, 30000], dtype)
    before = pages.pool.clone()
    map_triton(mapper, pages, mapped)
    assert torch.equal(pages.pool.nan_to_num(FILL), before.nan_to_num(FILL))
    assert_maps(mapper, pages, mapped)


@pytest.mark.parametrize("heads", ["all", "matched"])
@pytest.mark.parametrize(("head_dim", "dtype"), HEAD_DIMS)
def test_every_head_dim(head_dim, heads, dtype):
    mapper = mapper_of("arcee", "stablelm", heads, head_dim=head_dim, top_k=3, dtype=dtype)
    pages, mapped = random_pages(mapper, (32, 16), [33, 70], [3, 1000], dtype)
    map_triton(mapper, pages, mapped)
    assert_maps(mapper, pages, mapped)


@pytest.mark.parametrize("blocks", [(1, 32), (16, 3), (128, 64)])
def test_spans_blocks_and_rows_do_not_show(blocks):
    mapper = mapper_of("qwen3", "llama", head_dim=64, dtype=torch.bfloat16)
    lengths = [130, 1, 127, 200]  # spans begin and end inside of rows and of blocks
    pages, mapped = random_pages(mapper, blocks, lengths, [0, 9, 5, 100], torch.bfloat16)
    kernels = TritonMap(make_plan(mapper), workspace_bytes=WORKSPACE // 4)
    assert kernels.tokens_at_once < sum(lengths) // 2
    kernels(pages, mapped)
    assert_maps(mapper, pages, mapped)


def test_scratch_of_an_earlier_context_does_not_show():
    mapper = mapper_of("qwen3", "llama", dtype=torch.bfloat16)
    kernels = TritonMap(make_plan(mapper), workspace_bytes=WORKSPACE)
    pages, mapped = random_pages(mapper, (4, 8), [40], [0], torch.bfloat16)
    cell(pages, 0, 39)[:] = float("inf")
    with pytest.raises(VerificationError):
        kernels(pages, mapped)
    pages, mapped = random_pages(mapper, (4, 8), [5], [0], torch.bfloat16)
    kernels(pages, mapped)
    assert_maps(mapper, pages, mapped)


@pytest.mark.parametrize("heads", ["all", "matched"])
@pytest.mark.parametrize("top_k", [1, 8, 11])
def test_more_source_layers_than_fit_one_number(top_k, heads):
    specs = (
        ModelSpec.from_config(tiny_config(name, layers))
        for name, layers in (("llama", 13), ("qwen3", 3))
    )
    mapper = random_mapper(*specs, heads, top_k, dtype=torch.bfloat16)
    pages, mapped = random_pages(mapper, (4, 8), [19], [2], torch.bfloat16)
    map_triton(mapper, pages, mapped)
    assert_maps(mapper, pages, mapped)


def test_outputs_that_are_no_power_of_two():
    config = {"num_key_value_heads": 3, "num_attention_heads": 6, "hidden_size": 48, "head_dim": 64}
    spec = ModelSpec.from_config(tiny_config("llama", 3, **config))
    for heads in ("all", "matched"):
        mapper = random_mapper(spec, spec, heads, dtype=torch.bfloat16)
        pages, mapped = random_pages(mapper, (4, 8), [19], [2], torch.bfloat16)
        map_triton(mapper, pages, mapped)
        assert_maps(mapper, pages, mapped)


@pytest.mark.parametrize("dtypes", [("bfloat16", "float16"), ("float16", "bfloat16")])
def test_pools_of_other_dtypes(dtypes):
    weights, states = (getattr(torch, name) for name in dtypes)
    mapper = mapper_of("qwen3", "glm4", dtype=weights)
    pages, mapped = random_pages(mapper, (4, 8), [19], [2], states)
    map_triton(mapper, pages, mapped)
    assert_maps(mapper, pages, mapped)


def test_strided_pools_and_other_positions():
    mapper = mapper_of("qwen3", "llama", "matched", dtype=torch.bfloat16)
    pages, mapped = random_pages(mapper, (4, 8), [9, 21], [0, 300], torch.bfloat16)
    (pool, _), (target, buffer) = layers_first(pages.pool), layers_first(mapped.pool)
    pages = replace(pages, pool=pool)
    mapped = replace(mapped, pool=target, start_positions=mapped.start_positions + 40)
    map_triton(mapper, pages, mapped)
    assert_maps(mapper, pages, mapped)
    assert bool((buffer == FILL).all())


def test_as_torch_maps():
    mapper = mapper_of("llama", "qwen3", head_dim=64, dtype=torch.bfloat16)
    pages, mapped = random_pages(mapper, (4, 8), [50], [7], torch.bfloat16)
    other = replace(mapped, pool=mapped.pool.clone())
    map_triton(mapper, pages, mapped)
    map_paged(make_plan(mapper), pages, other)
    # The kernels round content keys to bfloat16 before the product, plain torch on a CPU does not.
    torch.testing.assert_close(mapped.pool, other.pool, rtol=0.02, atol=0.05)


def test_no_tokens_are_nothing_to_do():
    mapper = mapper_of("qwen3", "llama", dtype=torch.bfloat16)
    pages = paged(mapper.config.source, 4, torch.bfloat16, [0, 0], [0, 0])
    mapped = paged(mapper.config.target, 8, torch.bfloat16, [0, 0], [0, 0])
    map_triton(mapper, pages, mapped)
    assert bool((mapped.pool == FILL).all())


@pytest.mark.parametrize("name", [name for name in BAD if name != "not finite"])
def test_what_does_not_fit_is_refused_before_a_launch(name, monkeypatch):
    side, error, message, spoil = BAD[name]
    mapper = mapper_of("qwen3", "llama", dtype=torch.bfloat16)
    pages, mapped = random_pages(mapper, (4, 8), [9, 0, 1, 21], [0, 5, 7000, 30000], torch.bfloat16)
    good = mapped.pool
    if side == "source":
        pages = spoil(pages)
    else:
        mapped = spoil(mapped)
    kernels = TritonMap(make_plan(mapper))
    monkeypatch.setattr(kernels, "enqueue", None)  # calling it would be another error
    with pytest.raises(error, match=message):
        kernels(pages, mapped)
    assert bool((good == FILL).all())


def test_unaligned_pools_are_refused(monkeypatch):
    mapper = mapper_of("qwen3", "llama", dtype=torch.bfloat16)
    pages, mapped = random_pages(mapper, (4, 8), [9], [0], torch.bfloat16)
    kernels = TritonMap(make_plan(mapper))
    monkeypatch.setattr(kernels, "enqueue", None)
    shape = list(mapped.pool.shape)
    late = torch.zeros(mapped.pool.numel() + 1, dtype=torch.bfloat16)[1:].view(shape)
    with pytest.raises(UsageError, match="begin at a multiple of 16 bytes"):
        kernels(pages, replace(mapped, pool=late))
    wide = torch.zeros([*shape[:5], shape[5] + 1], dtype=torch.bfloat16)[..., :-1]
    with pytest.raises(UsageError, match="expected multiples of 8"):
        kernels(pages, replace(mapped, pool=wide))


@pytest.mark.parametrize("token", [0, 20])
def test_a_source_that_is_not_finite_is_an_error(token):
    mapper = mapper_of("qwen3", "llama", dtype=torch.bfloat16)
    pages, mapped = random_pages(mapper, (4, 8), [9, 21], [0, 5], torch.bfloat16)
    cell(pages, 1, token)[2, 1, 1, 3] = float("nan")
    with pytest.raises(VerificationError, match=r"source cache is not finite.* values of layer 2"):
        map_triton(mapper, pages, mapped)


@pytest.mark.parametrize("kind", ["key", "value"])
def test_a_result_that_overflows_is_an_error(kind):
    mapper = mapper_of("qwen3", "llama", dtype=torch.bfloat16)
    getattr(mapper, f"{kind}_bias")[2] += 1e5  # above float16's largest number
    pages, mapped = random_pages(mapper, (4, 8), [9], [0], torch.float16)
    with pytest.raises(VerificationError, match=r"mapped cache is not finite .* layer 2"):
        map_triton(mapper, pages, mapped)


def test_a_key_that_may_overflow_when_rotated_is_an_error():
    """The check sees keys before their rotation, which may make one dim the length of two."""
    mapper = mapper_of("qwen3", "llama", dtype=torch.float16)
    for kind in ("weight", "bias"):
        getattr(mapper, f"key_{kind}").zero_()
    mapper.key_bias[1] = 50_000.0  # twice in a pair, 70 711 long
    pages, mapped = random_pages(mapper, (4, 8), [9], [0], torch.float16)
    with pytest.raises(VerificationError):
        map_triton(mapper, pages, mapped)
    mapper.key_bias[1] = 40_000.0
    map_triton(mapper, pages, mapped)
    assert_maps(mapper, pages, mapped)


def test_unsupported_plans_say_what_to_do(monkeypatch):
    mapper = mapper_of("qwen3", "llama")
    with pytest.raises(UsageError, match=r"multiply in one of .* found torch.float32"):
        TritonMap(make_plan(mapper))
    odd = mapper_of("qwen3", "llama", head_dim=24, dtype=torch.bfloat16)
    with pytest.raises(UsageError, match="head_dim must be one of"):
        TritonMap(make_plan(odd))
    half = make_plan(mapper, dtype=torch.bfloat16)
    with pytest.raises(UsageError, match="does not hold 128 tokens"):
        TritonMap(half, workspace_bytes=1000)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(UsageError, match=r"compute capability 9.0 .* found cpu"):
        TritonMap(half)


def test_rows_of_the_source_may_share_blocks():
    mapper = mapper_of("qwen3", "llama", dtype=torch.bfloat16)
    pages, mapped = random_pages(mapper, (4, 8), [6, 6], [2, 2], torch.bfloat16)
    pages = changed(pages, "block_table", 1, pages.block_table[0])
    map_triton(mapper, pages, mapped)
    assert_maps(mapper, pages, mapped)
