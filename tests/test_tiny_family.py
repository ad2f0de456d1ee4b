"""The embedded models are what the README says: small, one family, and clearly ranked."""

import sys
from pathlib import Path

import pytest

from kvhub import ModelSpec, check_pair

FAMILY = Path(__file__).parents[1] / "examples" / "tiny_family"
NAMES = ("large", "middle", "small")


def test_they_fit_into_32_megabytes():
    files = [file for name in NAMES for file in (FAMILY / name).iterdir()]
    assert sum(file.stat().st_size for file in files) < 32e6


def test_every_pair_is_compatible_with_matched_heads():
    specs = [ModelSpec.from_pretrained(str(FAMILY / name)) for name in NAMES]
    for source in specs:
        for target in specs:
            assert check_pair(source, target, heads="matched") == []
    assert [spec.model_type for spec in specs] == ["qwen3"] * 3
    assert [spec.num_layers for spec in specs] == [8, 4, 4]


@pytest.mark.slow
def test_each_is_clearly_better_than_the_next_smaller(monkeypatch):
    monkeypatch.syspath_prepend(str(FAMILY))
    import measure

    monkeypatch.setattr(measure, "SEQUENCES", 16)
    large, middle, small = (measure.nll(name) for name in NAMES)
    assert large + 0.15 < middle
    assert middle + 0.15 < small
    assert large < 4  # a uniform guess over the vocabulary has ln 4096 = 8.3
    sys.modules.pop("measure")
