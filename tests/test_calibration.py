"""Calibration: the statistics are those of the models' own keys and values, however they come."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny_config, tiny_model
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvhub import ModelSpec, Statistics, calibrate, fit, select_layers
from kvhub.cache import cache_of, prefill
from kvhub.calibration import effective_weights
from kvhub.data import TokenBatch
from kvhub.errors import ConflictError, IncompatiblePairError, UsageError, VerificationError
from kvhub.moments import TENSORS

SEQUENCES, LENGTH = 20, 24


@pytest.fixture(scope="module")
def source():
    return tiny_model("qwen3", 2, seed=1)


@pytest.fixture(scope="module")
def target():
    return tiny_model("qwen3", 3, seed=2)


def sequences(count=SEQUENCES, length=LENGTH, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 64, (count, length), generator=generator)


def batches(ids, size=5, start=0):
    return [
        TokenBatch(part, torch.ones_like(part), tuple(range(start + i, start + i + len(part))))
        for i, part in zip(range(0, len(ids), size), ids.split(size), strict=True)
    ]


def assert_same(found, expected, tolerance=1e-6):
    assert found.provenance == expected.provenance
    for part in ("fitted", "held_out"):
        for kind in ("keys", "values"):
            a, b = getattr(found, part)[kind], getattr(expected, part)[kind]
            assert a.tokens == b.tokens
            for name in TENSORS:
                scale = float(getattr(b, name).abs().max())
                torch.testing.assert_close(
                    getattr(a, name), getattr(b, name), rtol=tolerance, atol=tolerance * scale
                )


def hooked_keys(model, ids):
    """Keys before rotation, from the layers' own k_norm: `[layers, kv_heads, tokens, head_dim]`."""
    found = []
    hooks = [
        layer.self_attn.k_norm.register_forward_hook(lambda _, __, output: found.append(output))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return torch.stack([keys.transpose(1, 2).transpose(0, 1).flatten(1, 2) for keys in found])


def test_the_statistics_are_those_of_hooked_keys_and_cached_values(source, target):
    ids = sequences()
    statistics = calibrate(source, target, batches(ids))
    held_out = torch.arange(SEQUENCES) % 10 == 9
    assert statistics.tokens == 18 * LENGTH
    assert statistics.held_out["values"].tokens == 2 * LENGTH
    for part, rows in (("fitted", ids[~held_out]), ("held_out", ids[held_out])):
        x, y = (hooked_keys(model, rows).double() for model in (source, target))
        x = x.permute(2, 0, 1, 3).flatten(1)
        y = y.permute(2, 0, 1, 3).flatten(1)
        moments = getattr(statistics, part)["keys"]
        dx, dy = x - x.mean(0), y - y.mean(0)
        torch.testing.assert_close(moments.gram[0], dx.T @ dx, rtol=1e-4, atol=2e-3)
        torch.testing.assert_close(moments.cross[0], dx.T @ dy, rtol=1e-4, atol=2e-3)
        torch.testing.assert_close(moments.source_mean[0], x.mean(0), rtol=1e-4, atol=1e-5)
        values = cache_of(prefill(target, rows)).layers[2].values.double()
        mean = getattr(statistics, part)["values"].target_mean[0, -32:]
        torch.testing.assert_close(mean, values.mean((0, 2)).flatten(), rtol=1e-4, atol=1e-5)


def test_batches_do_not_show(source, target):
    ids = sequences()
    expected = calibrate(source, target, batches(ids, 20))
    assert_same(calibrate(source, target, batches(ids, 3)), expected)
    assert_same(calibrate(source, target, ids.split(7)), expected)  # plain tensors


def test_padding_never_enters(source, target):
    ids = sequences()
    lengths = [LENGTH - index % 7 for index in range(SEQUENCES)]
    plain = [
        TokenBatch(ids[i : i + 1, :n], torch.ones(1, n, dtype=torch.long), (i,))
        for i, n in enumerate(lengths)
    ]
    mask = (torch.arange(LENGTH) < torch.tensor(lengths)[:, None]).long()
    garbage = torch.where(mask.bool(), ids, 63)
    padded = [TokenBatch(garbage, mask, tuple(range(SEQUENCES)))]
    expected = calibrate(source, target, plain)
    assert_same(calibrate(source, target, padded), expected)
    weighted = calibrate(source, target, plain, weighting="attention")
    assert_same(calibrate(source, target, padded, weighting="attention"), weighted, 1e-4)


def test_a_stride_takes_every_nth_token_of_every_sequence(source, target):
    statistics = calibrate(source, target, batches(sequences()), stride=4)
    assert statistics.tokens == 18 * LENGTH // 4
    assert statistics.provenance["stride"] == 4


def test_matched_statistics_are_those_derived_from_all(source, target):
    ids = sequences()
    derived = calibrate(source, target, batches(ids)).matched()
    direct = calibrate(source, target, batches(ids), heads="matched")
    assert_same(direct, derived)


def test_the_same_model_is_mapped_onto_itself(source):
    """The whole way round: calibrate, select, fit, map; the identity comes out."""
    ids = sequences(60)
    statistics = calibrate(source, source, batches(ids, 10))
    selection = select_layers(statistics, 1)
    assert selection.layers == [[0], [1]]
    mapper = fit(statistics, selection, ridge_lambda=1e-9)
    assert min(mapper.config.quality["held_out_r2_per_layer"]["keys"]) > 0.9999
    cache = cache_of(prefill(source, sequences(2, seed=5)))
    for a, b in zip(mapper(cache).layers, cache.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(a.values, b.values, rtol=1e-2, atol=1e-2)


def test_bfloat16_models_give_nearly_the_same(source, target):
    ids = sequences()
    expected = calibrate(source, target, batches(ids))
    half = calibrate(
        tiny_model("qwen3", 2, seed=1, dtype=torch.bfloat16),
        tiny_model("qwen3", 3, seed=2, dtype=torch.bfloat16),
        batches(ids),
    )
    a, b = half.fitted["values"].gram, expected.fitted["values"].gram
    # Three decimal digits of bfloat16, in weights, activations and cache.
    assert float((a - b).norm() / b.norm()) < 0.03


RANK = """
import sys
import torch
sys.path.insert(0, {tests!r})
from test_calibration import batches, sequences
from tiny import tiny_model
from kvhub import calibrate

rank, port, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
torch.distributed.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{{port}}", rank=rank, world_size=2
)
share = batches(sequences(), 1)[rank::2]
statistics = calibrate(tiny_model("qwen3", 2, seed=1), tiny_model("qwen3", 3, seed=2), share)
statistics.save(f"{{out}}/rank{{rank}}")
torch.distributed.destroy_process_group()
"""


def test_two_ranks_give_the_result_of_one(source, target, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = RANK.format(tests=str(Path(__file__).parent))
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(rank), str(port), str(tmp_path)])
        for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in ranks] == [0, 0]
    expected = calibrate(source, target, batches(sequences()))
    for rank in range(2):
        assert_same(Statistics.load(tmp_path / f"rank{rank}"), expected)


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from test_calibration import batches, sequences
from tiny import tiny_model
from kvhub import calibrate

def until_the_third():
    for number, batch in enumerate(batches(sequences())):
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch

calibrate(
    tiny_model("qwen3", 2, seed=1),
    tiny_model("qwen3", 3, seed=2),
    until_the_third(),
    checkpoint={path!r},
    checkpoint_seconds=0,
)
"""


def test_a_killed_calibration_goes_on_where_it_was(source, target, tmp_path):
    path = tmp_path / "work" / "checkpoint"
    code = KILLED.format(tests=str(Path(__file__).parent), path=str(path))
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    assert Statistics.load(path).provenance["next_sequence"] == 15
    expected = calibrate(source, target, batches(sequences()))
    seen = []

    def forward(*args):
        seen.append(1)

    hook = source.register_forward_pre_hook(forward)
    resumed = calibrate(source, target, batches(sequences()), checkpoint=path)
    hook.remove()
    assert_same(resumed, expected)
    assert len(seen) == 3  # two for the RoPE check, one for the last batch
    with pytest.raises(ConflictError, match="another calibration"):
        calibrate(source, target, batches(sequences()), checkpoint=path, stride=2)


def test_attention_weights_are_effective_and_of_mean_one():
    generator = torch.Generator().manual_seed(0)
    sensitivity = torch.rand(3, 2, 50, generator=generator) ** 8  # very uneven
    mask = torch.ones(3, 50, dtype=torch.long)
    mask[1, 30:] = 0
    weights = effective_weights(sensitivity, mask)
    assert float(weights.min()) >= 0
    assert torch.equal(weights[1, :, 30:], torch.zeros(2, 20))
    assert torch.equal(weights[..., :4], torch.ones(3, 2, 4))
    for row, count in enumerate((50, 30, 50)):
        found = weights[row, :, 4:count].double()
        torch.testing.assert_close(found.mean(-1), torch.ones(2, dtype=torch.float64))
        share = found.sum(-1) ** 2 / (found**2).sum(-1) / (count - 4)
        assert float(share.min()) > 0.5 - 1e-6
        order = sensitivity[row, 0, 4:count].argsort()
        assert bool((found[0][order].diff() >= 0).all())
    even = effective_weights(torch.ones(1, 1, 10), torch.ones(1, 10))
    torch.testing.assert_close(even, torch.ones(1, 1, 10))


def test_attention_weighting_weighs_what_the_target_looks_at(source, target):
    ids = sequences()
    uniform = calibrate(source, target, batches(ids))
    weighted = calibrate(source, target, batches(ids), weighting="attention")
    assert weighted.weighting == "attention"
    assert weighted.tokens == uniform.tokens
    share = weighted.fitted["values"].effective_tokens / weighted.tokens
    assert 0.4 < share < 0.999
    assert target.config._attn_implementation == "sdpa"


def test_too_little_or_wrong_input_is_refused(source, target):
    with pytest.raises(UsageError, match="held out"):
        calibrate(source, target, batches(sequences(5)))
    with pytest.raises(UsageError, match="Token ids"):
        calibrate(source, target, [sequences() + 40])
    with pytest.raises(UsageError, match="stride"):
        calibrate(source, target, batches(sequences()), stride=0)
    other = ModelSpec.from_model(tiny_model("qwen3", 4))
    with pytest.raises(IncompatiblePairError, match="num_layers"):
        calibrate(source, target, batches(sequences()), source_spec=other)


def test_sliding_windows_and_broken_models_are_refused(source, target):
    raw = tiny_config("mistral", 2, sliding_window=8)
    sliding = AutoModelForCausalLM.from_config(CONFIG_MAPPING["mistral"].from_dict(raw)).eval()
    with pytest.raises(IncompatiblePairError, match="window"):
        calibrate(sliding, target, batches(sequences()))
    broken = tiny_model("qwen3", 3, seed=2)
    broken.model.layers[1].self_attn.v_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(VerificationError, match="not finite"):
        calibrate(source, broken, batches(sequences()))
