"""vLLM's pools: what is read and written where, and what is refused."""

import pytest
import torch
from kvhub.exporters.vllm_pool import open_pool, require_packing
from vllm_fakes import pack

from kvhub.errors import IncompatiblePairError

LAYERS, BLOCKS, HEADS, BLOCK, DIM, CHUNK = 3, 7, 2, 16, 8, 32
# Strides of GPU pools: the order in memory of layer, block, head, token and content.
LAYOUTS = ["lbhnc", "lbnhc", "blhnc", "blnhc", "bhlnc", "lhbnc"]


def opened(caches, **changes):
    known = {"heads": (0, HEADS), "head_dim": DIM, "tokens_per_block": BLOCK, "chunk_tokens": CHUNK}
    return open_pool(caches, **{**known, **changes})


def named(layers):
    return {f"model.layers.{number}.self_attn.attn": layer for number, layer in enumerate(layers)}


def cpu_pool(dtype=torch.float32, chunk=CHUNK):
    states = torch.randn(LAYERS, 2, BLOCKS, HEADS, BLOCK, DIM).to(dtype)
    return states, opened(named([pack(layer) for layer in states]), chunk_tokens=chunk)


class OnGPU(torch.Tensor):
    """A tensor that says that it is on a GPU, for what depends on nothing else."""

    device = torch.device("cuda:0")


def gpu_layers(layout):
    states = torch.randn(LAYERS, BLOCKS, HEADS, BLOCK, 2 * DIM)
    order = ["lbhnc".index(axis) for axis in layout]
    memory = states.permute(order).contiguous()
    back = [order.index(axis) for axis in range(5)]
    return memory.permute(back)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("chunk", [8, 16, 32])
def test_cpu_blocks_are_read_as_they_are_packed(dtype, chunk):
    states, pool = cpu_pool(dtype, chunk)
    assert (pool.geometry, pool.num_blocks, pool.dtype) == ((LAYERS, HEADS, DIM), BLOCKS, dtype)
    assert pool.paged is None
    blocks = [5, 2, 6, 0]
    for start in range(0, 4 * BLOCK, chunk):
        expected = torch.stack(
            [
                states[:, :, blocks[token // BLOCK], :, token % BLOCK]
                for token in range(start, start + chunk)
            ],
            3,
        )
        read = pool.read(start, blocks[start // BLOCK :])
        assert read.is_contiguous()
        assert torch.equal(read, expected)
        assert read.numel() * read.element_size() == pool.chunk_bytes


def test_writing_touches_no_other_cell():
    states, pool = cpu_pool(chunk=8)
    new = torch.randn(LAYERS, 2, HEADS, 8, DIM)
    pool.write(24, [4], new)
    expected = states.clone()
    expected[:, :, 4, :, 8:16] = new
    for layer in range(LAYERS):
        assert torch.equal(pool.keys[layer], expected[layer, 0])
        assert torch.equal(pool.values[layer], expected[layer, 1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_layouts_are_one_view(layout):
    layers = gpu_layers(layout)
    caches = named([layer.as_subclass(OnGPU) for layer in layers])
    pool = opened(caches)
    paged = pool.paged.as_subclass(torch.Tensor)
    assert paged.shape == (BLOCKS, LAYERS, 2, HEADS, BLOCK, DIM)
    for kind in (0, 1):
        expected = layers[..., kind * DIM : (kind + 1) * DIM].transpose(0, 1)
        assert torch.equal(paged[:, :, kind], expected)
    paged[3, 1, 1, 0, 2] = 1.5
    assert (layers[1, 3, 0, 2, DIM:] == 1.5).all()


def test_layers_in_several_places_are_no_view():
    layers = [torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM).as_subclass(OnGPU) for _ in range(LAYERS)]
    assert opened(named(layers)).paged is None


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        ({}, "layers 0, 1, 2"),
        ({"model.layers.1.attn": torch.zeros(1)}, "layers 0, 1, 2"),
        ({"model.attn": torch.zeros(1)}, "layers 0, 1, 2"),
        (
            {f"draft.{n}.layers.{n}.attn": torch.zeros(1) for n in range(2)},
            "layers 0, 1, 2",
        ),
        (named([torch.zeros(2, BLOCKS, BLOCK, HEADS, DIM)]), "expected"),
        (named([torch.zeros(BLOCKS, HEADS, BLOCK, DIM)]), "expected"),
        (named([torch.zeros(BLOCKS, HEADS, 2 * BLOCK, 2 * DIM)]), "expected"),
        (named([torch.zeros(BLOCKS, BLOCK, HEADS, 2 * DIM).transpose(1, 2)]), "strides"),
        (
            named(
                [torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM, dtype=d) for d in (torch.half, None)]
            ),
            "the same in every layer",
        ),
    ],
)
def test_unknown_pools_are_refused(caches, message):
    with pytest.raises(IncompatiblePairError, match=message):
        opened(caches)


def test_unknown_instruction_sets_are_refused():
    require_packing("vec")
    require_packing("vec16")
    for isa in ("amx", "neon", "rvv"):
        with pytest.raises(IncompatiblePairError, match=isa):
            require_packing(isa)
