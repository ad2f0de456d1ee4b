"""Random regression problems for the tests of statistics, selection and ridge."""

from dataclasses import replace

import torch
from tiny import tiny_config

from kvhub import ModelSpec, Statistics
from kvhub.moments import group_features


def spec(layers=3, kv_heads=2, head_dim=4, name="model"):
    """A spec of a small Qwen3 model."""
    raw = tiny_config("qwen3", layers, num_key_value_heads=kv_heads, head_dim=head_dim)
    return replace(ModelSpec.from_config(raw, model_id=name), tokenizer_digest="0" * 64)


def random_rows(source, target, tokens, seed=0):
    """Source and target states of the same tokens for both kinds."""
    generator = torch.Generator().manual_seed(seed)
    mixing_seed = torch.Generator().manual_seed(99)  # the same relation whatever the tokens
    rows = {}
    for kind in ("keys", "values"):
        latent = torch.randn(tokens, 6, dtype=torch.float64, generator=generator)
        rows[kind] = tuple(
            random_states(spec, tokens, latent, generator, mixing_seed) for spec in (source, target)
        )
    return rows


def random_states(spec, tokens, latent, generator, mixing_seed):
    shape = (spec.num_layers, spec.kv_heads, tokens, spec.head_dim)
    noise = torch.randn(shape, dtype=torch.float64, generator=generator)
    mixing = torch.randn(
        latent.shape[-1], shape[0], shape[1], shape[3], dtype=torch.float64, generator=mixing_seed
    )
    return 0.3 * noise + torch.einsum("tc,clhd->lhtd", latent, mixing)


def statistics_of(rows, source, target, heads="all", held_out=None, weights=None):
    """Statistics of rows from `random_rows`."""
    statistics = Statistics.empty(source, target, heads)
    for part, data in (("fitted", rows), ("held_out", held_out)):
        for kind, pair in (data or {}).items():
            x, y = (group_features(states, heads) for states in pair)
            getattr(statistics, part)[kind].update(x, y, weights)
    return statistics
