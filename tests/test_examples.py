"""The example scripts run as they stand, on the embedded pair."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mapping import random_mapper
from tiny import tiny_model

from kvhub import KVMapper

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def run(script, *arguments):
    done = subprocess.run(
        [sys.executable, EXAMPLES / script, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_fit_and_save_then_load_and_hand_off(tmp_path):
    fitted = run("01_fit_and_save.py", tmp_path / "mine")
    assert "mismatches: []" in fitted
    mapper = KVMapper.from_pretrained(tmp_path / "mine")
    assert mapper.config.top_k == 2
    assert mapper.config.quality["held_out_r2"]["keys"] > 0.5
    handed_off = run("02_load_and_hand_off.py", tmp_path / "mine")
    assert "mapped hand-off" in handed_off
    assert len(handed_off.split("--- the target after reading everything again")[1]) > 20
    talked = run("04_conversation.py", tmp_path / "mine")
    assert len(re.findall(r"^--- (small|large): ", talked, re.MULTILINE)) == 5
    assert re.search(r"tokens    4 to +\d+: mapped from the small one", talked)


def test_export(tmp_path):
    models = [tiny_model("qwen3", layers, seed=layers) for layers in (2, 3)]
    random_mapper(*models).save_pretrained(tmp_path / "mine")
    printed = run("03_export.py", tmp_path / "mine")
    assert "target_keys: [3, 2, 2, 100, 16] float32" in printed


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("0*.py")), ids=lambda path: path.name)
def test_examples_are_short(script):
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 60
