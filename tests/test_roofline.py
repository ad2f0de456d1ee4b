"""The arithmetic of predicted times: its counts against PyTorch's, its limits, and its page."""

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mapping import random_mapper
from tiny import tiny_model
from torch.utils.flop_counter import FlopCounterMode

from kvhub import ModelSpec
from kvhub.errors import UsageError
from kvhub.estimates import estimate
from kvhub.models import count_parameters
from kvhub.roofline import (
    DEVICES,
    H100_SXM,
    H200,
    QWEN3_14B,
    QWEN3_32B,
    QWEN3_32B_WEIGHTS,
    map_flops,
    map_time,
    predict,
    prefill_flops,
    prefill_time,
    transfer_time,
)

PAGE = Path(__file__).parents[1] / "docs" / "roofline.md"
ROUNDING = 1 + 1e-9  # of sums in another order


def qwen(heads, tokens, device=H100_SXM, top_k=8):
    return map_time(QWEN3_14B, QWEN3_32B, heads, top_k, tokens, device)


@pytest.fixture(scope="module")
def pair():
    source = tiny_model("qwen3", 3, seed=1)
    target = tiny_model("qwen3", 4, seed=2, num_attention_heads=8, tie_word_embeddings=True)
    return source, target


@pytest.mark.parametrize("heads", ["all", "matched"])
def test_operations_and_size_are_those_of_a_real_mapper(pair, heads):
    source, target = map(ModelSpec.from_model, pair)
    mapper = random_mapper(source, target, heads, top_k=2)
    tokens = 7
    states = torch.randn(source.num_layers, 1, source.kv_heads, tokens, source.head_dim)

    def product(out, left, right, **options):
        return 2 * left[0] * left[1] * left[2] * right[2]

    # PyTorch counts it out of place only.
    in_place = {torch.ops.aten.baddbmm_: product}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        mapper.map_keys(states)
        mapper.map_values(states)
    assert counter.get_total_flops() == tokens * map_flops(source, target, heads, 2)
    found = estimate(source, target, heads, 2, 10**6)
    assert found.map_flops == map_flops(source, target, heads, 2)
    assert found.parameters == mapper.num_parameters
    assert found.size_bytes == 2 * mapper.num_parameters
    assert found.features == mapper.key_weight.shape[2]


def test_prefill_operations_are_those_of_a_real_model(pair):
    model = pair[1]
    spec, tokens = ModelSpec.from_model(model), 12
    model.config._attn_implementation = "eager"
    with FlopCounterMode(display=False) as counter:
        model.model(torch.zeros(1, tokens, dtype=torch.long))
    matrices = sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2)
    attention = 4 * spec.num_layers * spec.attention_heads * spec.head_dim * tokens**2
    assert counter.get_total_flops() == 2 * matrices * tokens + attention
    # Eager attention also multiplies the half that its mask then removes.
    assert prefill_flops(spec, matrices, tokens) == 2 * matrices * tokens + attention // 2


def test_embeddings_are_no_operations(pair, tmp_path):
    model = pair[1]
    model.config.save_pretrained(tmp_path)
    source, target = map(ModelSpec.from_model, pair)
    found = estimate(source, target, "all", 2, count_parameters(str(tmp_path)))
    layers = sum(p.numel() for p in model.model.layers.parameters())
    norm = target.hidden_size
    for prediction in found.predictions:
        device = next(d for d in DEVICES if d.name == prediction.device)
        expected = prefill_time(target, layers + norm, prediction.tokens, device)
        assert prediction.prefill == expected


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)
@pytest.mark.parametrize("tokens", [8192, 32768])
def test_a_map_is_a_few_percent_of_a_prefill(device, tokens):
    """Bounds on the map alone, for the paper's pair."""
    shares = {
        heads: predict(QWEN3_14B, QWEN3_32B, heads, 8, QWEN3_32B_WEIGHTS, tokens, device).share
        for heads in ("all", "matched")
    }
    assert shares["all"] < 0.05
    assert shares["matched"] < 0.01


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)
@pytest.mark.parametrize("heads", ["all", "matched"])
@pytest.mark.parametrize("tokens", [1, 100, 8192, 100_000])
def test_no_time_is_below_what_the_peaks_allow(device, heads, tokens):
    time = qwen(heads, tokens, device)
    weights = 2 * 64 * 8 * 1024 * 1024 // (1 if heads == "all" else 8)
    compulsory = 2 * weights + tokens * (40 + 64) * 2 * 1024 * 2
    assert time.total * device.bf16_tflops * 1e12 * ROUNDING > 2 * weights * tokens
    assert time.total * device.hbm_tbps * 1e12 * ROUNDING > compulsory
    assert max(time.compute, time.hbm) + time.launch <= time.total * ROUNDING
    assert time.total <= (time.compute + time.hbm + time.launch) * ROUNDING
    prefill = prefill_time(QWEN3_32B, QWEN3_32B_WEIGHTS, tokens, device)
    operations = prefill_flops(QWEN3_32B, QWEN3_32B_WEIGHTS, tokens)
    assert prefill * device.bf16_tflops * 1e12 * ROUNDING > operations
    assert prefill * device.hbm_tbps * 1e12 * ROUNDING > 2 * QWEN3_32B_WEIGHTS


def test_what_bounds_a_map():
    """More of what a time is bound by makes it shorter, more of the other does not."""
    faster = dataclasses.replace(H100_SXM, bf16_tflops=2 * H100_SXM.bf16_tflops)
    matched = qwen("matched", 8192)
    assert matched.hbm > matched.compute
    assert qwen("matched", 8192, faster).total == matched.total
    assert qwen("matched", 8192, H200).total < 0.75 * matched.total
    every = qwen("all", 8192)
    assert every.compute > every.hbm
    assert qwen("all", 8192, faster).total < 0.6 * every.total
    assert 0.95 * every.total < qwen("all", 8192, H200).total < every.total


@pytest.mark.parametrize("heads", ["all", "matched"])
def test_longer_contexts_take_proportionally_longer(heads):
    """Once the weights, read again for each chunk, are a small part."""
    times = [qwen(heads, tokens).total for tokens in (3276, 32760, 327600)]
    for shorter, longer in itertools.pairwise(times):
        assert longer == pytest.approx(10 * shorter, rel=0.01)


def test_chunks_launch_and_read_the_weights_again():
    one, two = qwen("all", 3276), qwen("all", 3277)
    assert two.launch == 2 * one.launch
    weights = 2 * 2 * 64 * 8 * 1024 * 1024
    seconds = weights / (H100_SXM.hbm_tbps * 1e12)
    assert 1.2 * seconds < two.hbm - one.hbm < 1.3 * seconds


def test_prefill_is_bound_by_products_then_attention_then_weights():
    short, long, longer = (
        prefill_time(QWEN3_32B, QWEN3_32B_WEIGHTS, tokens, H100_SXM)
        for tokens in (16, 100_000, 1_000_000)
    )
    assert short == prefill_time(QWEN3_32B, QWEN3_32B_WEIGHTS, 1, H100_SXM)
    assert 60 < longer / long < 100
    # A model of no weights still launches its kernels.
    assert prefill_time(QWEN3_32B, 0, 1, H100_SXM) == pytest.approx(64 * 9 * 5e-6)


def test_a_copy_takes_its_bytes_over_the_link():
    nvlink = transfer_time(QWEN3_14B, 32768, H100_SXM, "nvlink")
    pcie = transfer_time(QWEN3_14B, 32768, H100_SXM, "pcie")
    assert pcie == pytest.approx(nvlink * 450 / 63)
    # 5.37 GB of source cache: no faster than the links, and not half as fast.
    assert 5.36 / 450 < nvlink < 2 * 5.37 / 450


def test_a_gain_counts_the_copy():
    found = predict(QWEN3_14B, QWEN3_32B, "all", 8, QWEN3_32B_WEIGHTS, 8192, H100_SXM)
    assert found.gain == pytest.approx(found.prefill / (found.map.total + found.nvlink))
    assert found.gain < 1 / found.share


def test_estimates_predict_for_each_device_and_cut_k(pair):
    source, target = map(ModelSpec.from_model, pair)
    found = estimate(source, target, "all", 8, 10**6)
    assert found.top_k == source.num_layers == 3
    assert [p.device for p in found.predictions] == [d.name for d in DEVICES for _ in range(3)]
    assert found.gain == {p.tokens: p.gain for p in found.predictions[:3]}
    first = found.predictions[0]
    assert first.map == map_time(source, target, "all", 3, 1024, H100_SXM)


def test_impossible_settings_are_refused():
    for top_k in (0, -1, 41):
        with pytest.raises(UsageError, match=f"1 to 40 source layers.* found {top_k}"):
            qwen("all", 100, top_k=top_k)
    for tokens in (0, -5):
        with pytest.raises(UsageError, match=f"found {tokens}"):
            qwen("all", tokens)
        with pytest.raises(UsageError, match=f"found {tokens}"):
            transfer_time(QWEN3_14B, tokens, H100_SXM, "pcie")
        with pytest.raises(UsageError, match=f"found {tokens}"):
            prefill_time(QWEN3_32B, 10, tokens, H100_SXM)


def test_the_page_holds_what_the_command_prints():
    code = "import runpy, sys; runpy.run_module('kvhub.roofline', run_name='__main__');"
    code += "sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    tables = done.stdout.split("\n\n")
    assert len(tables) == 3
    page = PAGE.read_text(encoding="utf-8")
    for table in tables:
        assert table.strip() in page, "run python -m kvhub.roofline and replace the page's tables"


# Layers, attention heads and matrix weights of both; milliseconds from arXiv 2608.03893.
QWEN3_14B_WEIGHTS = 40 * (2 * 5120 * 5120 + 2 * 5120 * 1024 + 3 * 5120 * 17408)
PREFILLS = [
    (QWEN3_32B, QWEN3_32B_WEIGHTS, 8192, 1154.8, 54),
    (QWEN3_32B, QWEN3_32B_WEIGHTS, 32768, 6975.3, 56),
    (QWEN3_14B, QWEN3_14B_WEIGHTS, 8192, 501.0, 52),
    (QWEN3_14B, QWEN3_14B_WEIGHTS, 32768, 2952.7, 52),
]


@pytest.mark.parametrize(("model", "weights", "tokens", "milliseconds", "percent"), PREFILLS)
def test_one_rate_explains_the_published_prefills(model, weights, tokens, milliseconds, percent):
    """As the page argues: FlashAttention-2 at 35 % of peak, and the rest by products."""
    peak = H100_SXM.flops
    attention = 2 * model.num_layers * model.attention_heads * 128 * tokens**2
    rate = 2 * weights * tokens / (milliseconds / 1e3 - attention / (0.35 * peak))
    assert round(100 * rate / peak) == percent
    assert f"{percent} %" in PAGE.read_text(encoding="utf-8")


def test_the_published_prefill_was_of_one_sequence():
    operations = prefill_flops(QWEN3_32B, QWEN3_32B_WEIGHTS, 8192)
    assert 2 * operations / 1.1548 == pytest.approx(1.02 * H100_SXM.flops, rel=0.005)


def test_the_published_map_is_slower_than_the_roofline():
    for tokens, milliseconds, times in ((8192, 67.8, 2.3), (32768, 277.6, 2.4)):
        here = qwen("all", tokens).total + transfer_time(QWEN3_14B, tokens, H100_SXM, "nvlink")
        assert milliseconds / 1e3 / here == pytest.approx(times, abs=0.05)
