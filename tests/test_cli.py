"""The command line: exit codes, one error and one hint line, JSON, and nothing lost half way."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from mapping import random_mapper
from tiny import tiny_config, tiny_model
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvhub import KVMapper, Statistics, cli
from kvhub.gate import Gate
from kvhub.package import save
from kvhub.roofline import DEVICES
from kvhub.store import home, mapper_names, mapper_path

ROOT = Path(__file__).parents[1]
FAMILY = ROOT / "examples" / "tiny_family"


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def kvhub(capsys, monkeypatch):
    """Run the command in this process."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvhub", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        return Result(int(stopped.value.code or 0), captured.out, captured.err)

    return run


def assert_refused(result, code, *patterns):
    """Exactly one Error line that says what was expected and found, and one Hint line."""
    assert result.code == code, result.err
    lines = [line for line in result.err.splitlines() if re.match(r"Error:|Hint:", line)]
    assert [line.split(":")[0] for line in lines] == ["Error", "Hint"], result.err
    assert "Traceback" not in result.err
    assert len(lines[1]) > len("Hint: ")
    for pattern in patterns:
        assert re.search(pattern, lines[0]), lines[0]


SMALL = ("--data", "stdlib", "--sequences", "30", "--length", "48", "--top-k", "1")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two tiny random models on disk with the embedded family's tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    for name, layers, seed in (("small", 2, 1), ("large", 3, 2)):
        model = tiny_model(
            "qwen3", layers, seed=seed, vocab_size=4096, bos_token_id=0, eos_token_id=0
        )
        model.save_pretrained(folder / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name / file).write_bytes((FAMILY / "large" / file).read_bytes())
    return folder / "small", folder / "large"


def fit_arguments(pair, name="mine", *more):
    return ("fit", "--source", pair[0], "--target", pair[1], "--name", name, *SMALL, *more)


def test_the_whole_life_of_a_mapper(kvhub, pair, tmp_path):
    fitted = kvhub(*fit_arguments(pair), "--json")
    assert fitted.code == 0, fitted.err
    assert fitted.json["name"] == "mine"
    assert fitted.json["parameters"] == 2 * 3 * (32 * 32 + 32)
    assert fitted.json["tokens"] == 27 * 48
    assert Path(fitted.json["path"]) == mapper_path("mine")
    assert not list(home().glob("work/*"))
    tensors = KVMapper.from_pretrained("mine").tensors()

    report = kvhub("evaluate", "mine", "--sequences", "4", "--json")
    assert report.code == 0, report.err
    assert set(report.json["settings"]) == {
        "target_alone",
        "source_alone",
        "mapped",
        "no_context",
    }
    package = mapper_path("mine")
    assert json.loads((package / "report.json").read_text()) == report.json
    assert len(list((package / "plots").glob("*.png"))) == 5
    assert "target alone" in (package / "README.md").read_text()
    for name, tensor in KVMapper.from_pretrained("mine").tensors().items():
        assert torch.equal(tensor, tensors[name])

    assert kvhub("verify", "mine", "--json").json["verified"] is True
    assert kvhub("info", "mine", "--json").json["target"]["num_layers"] == 3
    assert [m["name"] for m in kvhub("list", "--json").json["mappers"]] == ["mine"]
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("import os\n\n\ndef main():\n    return os.getcwd()\n")
    handed = kvhub("handoff", "mine", "--prompt-file", prompt, "--max-new-tokens", "5", "--json")
    assert handed.code == 0, handed.err
    assert len(handed.json["mapped"]["output_ids"]) == 5
    assert set(handed.json["texts"]) == {"target", "mapped", "source"}
    handoff = ("handoff", "mine", "--prompt-file", prompt, "--max-new-tokens", "5", "--json")
    exact = kvhub(*handoff, "--exact-budget", "1000").json
    assert exact["mapped"]["output_ids"] == exact["target"]["output_ids"]
    curve = kvhub("evaluate", "mine", "--sequences", "4", "--exact-curve")
    assert curve.code == 0, curve.err
    assert "how many tokens the target computes itself" in curve.out
    points = json.loads((package / "report.json").read_text())["exact"]
    assert [point["budget"] for point in points] == [0, 1, 4, 16, 64]
    assert points[-1]["kl"]["value"] == pytest.approx(0, abs=1e-6)
    assert (package / "plots" / "exact.png").is_file()
    timings = kvhub("bench", "mine", "--lengths", "16,32", "--repeats", "1", "--json").json
    assert [timing["tokens"] for timing in timings["timings"]] == [16, 32]
    predicted = {(p["device"], p["tokens"]): p["gain"] for p in timings["predictions"]}
    assert set(predicted) == {(device.name, tokens) for device in DEVICES for tokens in (16, 32)}


def test_a_mapper_below_its_gate_exits_9_and_is_not_used(kvhub, pair, monkeypatch):
    assert kvhub(*fit_arguments(pair)).code == 0
    prompt = ("--prompt", "import os, sys\n" * 20, "--max-new-tokens", "4", "--json")
    assert_refused(kvhub("handoff", "mine", *prompt, "--policy", "gate"), 3, "no report")
    mapper = KVMapper.from_pretrained("mine")
    mapper.key_weight.mul_(-5)
    save(mapper, mapper_path("mine"), overwrite=True)
    evaluate = ("evaluate", "mine", "--sequences", "3", "--length", "48")
    failed = kvhub(*evaluate, "--gate", "--json")
    assert_refused(failed, 9, "does not meet its gate: .*key_r2")
    assert failed.json["gate"]["passed"] is False
    written = json.loads((mapper_path("mine") / "report.json").read_text())
    assert written == failed.json
    assert "Quality gate: **not met**" in (mapper_path("mine") / "README.md").read_text()
    shown = kvhub(*evaluate)
    assert shown.code == 0
    assert "FAIL" in shown.out
    handed = kvhub("handoff", "mine", *prompt, "--policy", "gate").json
    assert handed["decision"]["mapped"] is False
    assert handed["mapped"]["output_ids"] == handed["target"]["output_ids"]
    monkeypatch.setattr("kvhub.gate.Gate", lambda: Gate(1e9, -1e9, -1.0, -1e9))
    assert kvhub(*evaluate, "--gate").code == 0
    probed = kvhub("handoff", "mine", *prompt, "--policy", "probe").json["decision"]
    assert probed["excess"] is not None
    assert probed["mapped"] is (probed["excess"] <= 0.05)


def test_a_refit_refuses_settings_that_the_statistics_do_not_have(kvhub, pair, tmp_path):
    file = ("--statistics", tmp_path / "statistics")
    assert kvhub(*fit_arguments(pair, "mine", *file)).code == 0
    again = ("--overwrite", *file)
    assert kvhub(*fit_arguments(pair, "mine", *again)).code == 0
    for option, value in (
        ("weighting", "attention"),
        ("data", "english"),
        ("sequences", 31),
        ("length", 47),
        ("stride", 2),
    ):
        refused = kvhub(*fit_arguments(pair, "mine", *again, f"--{option}", value))
        assert_refused(refused, 2, f"made otherwise: {option} .* there and {value} here")


def test_tables_are_for_people(kvhub, pair):
    assert kvhub(*fit_arguments(pair)).code == 0
    for arguments, expected in (
        (("list",), "mine"),
        (("info", "mine"), "rope_theta"),
        (("verify", "mine"), "model.safetensors"),
        (("recipes",), "qwen3-14b-to-32b"),
        (("env",), "transformers"),
        (("check", *pair), "verdict"),
        (("evaluate", "mine", "--sequences", "2"), "retention"),
        (("handoff", "mine", "--prompt", "import sys", "--max-new-tokens", "2"), "mapped hand-off"),
        (("bench", "mine", "--lengths", "16", "--repeats", "1"), "prefill again"),
    ):
        result = kvhub(*arguments)
        assert result.code == 0, result.err
        assert expected in result.out


def test_check_gives_every_decision_and_an_estimate(kvhub, pair):
    found = kvhub("check", *pair, "--top-k", "2", "--json").json
    assert found["compatible"] is True
    assert {decision["verdict"] for decision in found["decisions"]} == {"ok"}
    estimate = found["estimate"]
    assert estimate["parameters"] == 2 * 3 * (2 * 32 * 32 + 32)
    assert estimate["statistics_bytes"] == 2 * 2 * 8 * 64 * (64 + 96)
    assert list(estimate["gain"]) == ["1024", "8192", "32768"]
    predictions = estimate["predictions"]
    assert [(p["device"], p["tokens"]) for p in predictions[::3]] == [
        ("H100 SXM", 1024),
        ("H200", 1024),
    ]
    assert estimate["gain"]["8192"] == predictions[1]["gain"] > 1


def test_the_table_of_check_says_that_its_times_are_predicted(kvhub, pair):
    out = kvhub("check", *pair, "--top-k", "2").out
    assert re.search(r"Predicted .* not measured", out)
    for device in ("H100 SXM", "H200"):
        assert len(re.findall(rf"{device} .*\d\.\dx", out)) == 3


def test_check_needs_a_layer_to_map_from(kvhub, pair):
    assert_refused(kvhub("check", *pair, "--top-k", "0"), 2, "1 to 2 source layers.* found 0")


def test_a_wrong_pair_is_refused(kvhub, pair, tmp_path):
    raw = tiny_config("mistral", 2, sliding_window=8, vocab_size=4096)
    sliding = AutoModelForCausalLM.from_config(CONFIG_MAPPING["mistral"].from_dict(raw))
    sliding.save_pretrained(tmp_path / "sliding")
    (tmp_path / "sliding" / "tokenizer.json").write_bytes(
        (FAMILY / "large" / "tokenizer.json").read_bytes()
    )
    checked = kvhub("check", tmp_path / "sliding", pair[1])
    assert_refused(checked, 6, "sliding")
    assert "refuse" in checked.out
    assert_refused(
        kvhub("fit", "--source", tmp_path / "sliding", "--target", pair[1], "--name", "m", *SMALL),
        6,
        "sliding_window is 8 in the source and None in the target",
    )
    other = json.loads((pair[0] / "tokenizer.json").read_text())
    vocabulary = other["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    strange = tmp_path / "strange"
    strange.mkdir()
    for file in pair[0].iterdir():
        (strange / file.name).write_bytes(file.read_bytes())
    (strange / "tokenizer.json").write_text(json.dumps(other))
    assert_refused(kvhub("check", strange, pair[1]), 6, "tokenizer")
    assert mapper_names() == []


def test_unknown_names_and_files_are_not_found(kvhub, pair):
    assert_refused(kvhub("fit", "qwen9"), 3, "no recipe 'qwen9'", "qwen3-8b-to-32b")
    for command in ("evaluate", "info", "verify", "handoff", "bench"):
        more = ("--prompt", "x y z") if command == "handoff" else ()
        assert_refused(kvhub(command, "missing", *more), 3, "No mapper 'missing'")
    assert_refused(kvhub("check", "./no/such/model", pair[1]), 3)
    assert_refused(
        kvhub(*fit_arguments(pair, "m", "--data", "no-file.jsonl")), 3, r"no-file\.jsonl"
    )
    random_mapper(tiny_model("qwen3", 2), tiny_model("qwen3", 3)).save_pretrained(mapper_path("m"))
    assert_refused(kvhub("handoff", "m", "--prompt-file", "no-prompt.txt"), 3, "no-prompt.txt")


def test_a_model_on_the_hub_needs_the_network(kvhub, pair):
    assert_refused(kvhub("check", "org/model", pair[1]), 5, "org/model")


def test_too_few_tokens_are_refused_before_a_model_is_loaded(kvhub, pair):
    result = kvhub(*fit_arguments(pair, "m"), "--sequences", "10", "--length", "32", "--top-k", "2")
    assert result.code == 0  # 288 tokens for 64 features is allowed, with a warning
    assert "Warning: 288 tokens for 64 features" in result.err
    result = kvhub(*fit_arguments(pair, "n"), "--top-k", "3")
    assert_refused(result, 2, "source's 2 layers; found 3")
    result = kvhub(*fit_arguments(pair, "n"), "--sequences", "2", "--length", "32", "--top-k", "2")
    assert_refused(result, 2, "Too few calibration tokens: 58 for 64 features")
    assert mapper_names() == ["m"]
    assert not list(home().glob("work/*"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("fit", "--no-such-option"),
        ("fit",),
        ("fit", "tiny-middle-to-large", "--heads", "some"),
        ("fit", "tiny-middle-to-large", "--name", "../outside"),
        ("bench", "x", "--lengths", "many"),
        ("handoff", "x"),
        ("check",),
    ],
)
def test_wrong_usage(kvhub, arguments):
    assert_refused(kvhub(*arguments), 2)
    failed = kvhub(*arguments, "--json")
    assert failed.json["error"]["exit_code"] == failed.code == 2
    assert failed.json["error"]["hint"]


def test_an_existing_mapper_is_kept_unless_asked(kvhub, pair):
    assert kvhub(*fit_arguments(pair)).code == 0
    before = (mapper_path("mine") / "manifest.json").read_bytes()
    assert_refused(kvhub(*fit_arguments(pair, "mine", "--ridge-lambda", "5")), 8, "'mine' already")
    assert (mapper_path("mine") / "manifest.json").read_bytes() == before
    assert kvhub(*fit_arguments(pair, "mine", "--ridge-lambda", "5", "--overwrite")).code == 0
    assert KVMapper.from_pretrained("mine").config.ridge["lambda"] == 5
    assert mapper_names() == ["mine"]


def test_damaged_packages_fail_verification(kvhub, pair):
    assert kvhub(*fit_arguments(pair)).code == 0
    tensors = mapper_path("mine") / "model.safetensors"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-8])
    expected = f"expected {len(whole)} bytes, found {len(whole) - 8}"
    for command in ("verify", "evaluate", "bench"):
        assert_refused(kvhub(command, "mine"), 7, expected)
    tensors.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert_refused(kvhub("handoff", "mine", "--prompt", "a b c"), 7, "expected sha256")
    config = mapper_path("mine") / "config.json"
    config.write_text(config.read_text()[:-20])
    assert_refused(kvhub("info", "mine"), 7, "not JSON")


def test_statistics_are_saved_and_refitted_without_models(kvhub, pair, tmp_path, monkeypatch):
    file = tmp_path / "pair.statistics"
    assert kvhub(*fit_arguments(pair, "one", "--statistics", file)).code == 0
    assert Statistics.load(file).tokens == 27 * 48

    def no_model(*arguments, **options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("kvhub.models.load_model", no_model)
    refit = kvhub(*fit_arguments(pair, "two"), "--top-k", "2", "--statistics", file, "--json")
    assert refit.code == 0, refit.err
    assert "no model is loaded" in refit.err
    assert all(len(layers) == 2 for layers in refit.json["selection"])
    matched = kvhub(*fit_arguments(pair, "m"), "--heads", "matched", "--statistics", file, "--json")
    assert matched.json["parameters"] == 2 * 3 * (2 * 16 * 16 + 32)


def test_statistics_of_another_pair_are_refused(kvhub, pair, tmp_path):
    file = tmp_path / "pair.statistics"
    assert kvhub(*fit_arguments(pair, "one", "--statistics", file)).code == 0
    swapped = kvhub(*fit_arguments(pair[::-1], "two", "--statistics", file))
    assert_refused(swapped, 6, "source model", "expected num_layers 2 but found 3")
    file.write_bytes(file.read_bytes()[:1000])
    assert_refused(kvhub(*fit_arguments(pair, "two", "--statistics", file)), 7, "whole safetensors")
    assert mapper_names() == ["one"]


def test_a_mapper_of_other_models_is_refused(kvhub, pair):
    assert kvhub(*fit_arguments(pair)).code == 0
    assert_refused(
        kvhub("handoff", "mine", "--prompt", "import os, sys", "--source", pair[1]),
        6,
        "source model",
    )


def test_a_broken_model_is_refused(kvhub, pair, tmp_path):
    """NaN in the weights makes NaN in the cache, which must not reach the statistics."""
    model = AutoModelForCausalLM.from_pretrained(pair[1])
    model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "broken" / file).write_bytes((pair[1] / file).read_bytes())
    assert_refused(kvhub(*fit_arguments((pair[0], tmp_path / "broken"))), 7, "not finite")
    assert mapper_names() == []


def test_faults_of_ours_are_one_line_unless_debugging(kvhub, monkeypatch):
    def fail():
        raise RuntimeError("a fault")

    monkeypatch.setattr("kvhub.pipeline.list_store", fail)
    assert_refused(kvhub("list"), 1, "Unexpected RuntimeError: a fault")
    monkeypatch.setenv("KVHUB_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["kvhub", "list"])
    with pytest.raises(RuntimeError, match="a fault"):
        cli.main()


def test_every_command_shows_an_example(kvhub):
    listing = kvhub("--help").out
    commands = re.findall(r"^  ([a-z]+)  ", listing.split("Commands:")[1], re.MULTILINE)
    assert len(commands) == 22
    for command in commands:
        assert f"Example: kvhub {command}" in " ".join(kvhub(command, "--help").out.split())


@pytest.mark.slow
def test_torchrun_shares_the_calibration(kvhub, pair):
    """Two processes give the mapper of one; only the first of them writes it."""
    assert kvhub(*fit_arguments(pair, "one")).code == 0
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    arguments = [*ranks, "-m", "kvhub", *map(str, fit_arguments(pair, "two")), "--json"]
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "two"
    one, two = (KVMapper.from_pretrained(name).tensors() for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-4)
    assert not list(home().glob("work/*"))


def test_the_installed_command_works_from_anywhere(tmp_path):
    command = Path(sys.executable).parent / "kvhub"
    done = subprocess.run(
        [command, "recipes", "--json"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert len(json.loads(done.stdout)["recipes"]) == 12
    assert done.stderr == ""
