"""The card: what it says is what the files say, the Hub takes it, and people's own text stays."""

import contextlib
import io
import itertools
import json
import random
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hub_card import card_errors
from hub_server import HubServer, connect_client
from huggingface_hub import ModelCard, close_session
from kvhub.cards import License, render_card, stricter_license
from kvhub.cards.own_text import BEGIN, END, read_own_text
from mapping import config_for, random_mapper
from regression import spec
from tiny import tiny_model
from typer.testing import CliRunner

from kvhub import KVMapper, ModelSpec
from kvhub.cli import app
from kvhub.gate import Gate, check_gate
from kvhub.package import Manifest
from kvhub.report import SETTINGS, Estimate, Fidelity, Report, SettingMetrics
from kvhub.store import mapper_path

FAMILY = Path(__file__).parents[1] / "examples" / "tiny_family"
COMMITS = ("a" * 40, "b" * 40)
PLOTS = ["fidelity per layer.png", "settings.png"]
BUILT_IN = {
    "data": "stdlib",
    "kind": "built-in",
    "python": "3.11.7",
    "files": 455,
    "sha256": "5" * 64,
}
DATASET = {
    "data": "HuggingFaceFW/fineweb-edu:sample-10BT",
    "kind": "dataset",
    "split": "train",
    "revision": "d" * 40,
}
COUNTS = {"length": 256, "stride": 2, "held_out_every": 10, "sequences": 128}


def make_config(calibration=BUILT_IN, **changes):
    """What config.json holds; `changes` are of the config, those of a model as source_... ."""
    models = {}
    for role, name, layers, commit in zip(
        ("source", "target"), ("org/small", "org/large"), (3, 4), COMMITS, strict=True
    ):
        model = replace(spec(layers, name=name), revision=commit)
        own = [key for key in changes if key.startswith(f"{role}_")]
        models[role] = replace(
            model, **{key.removeprefix(f"{role}_"): changes.pop(key) for key in own}
        )
    config = config_for(models["source"], models["target"], top_k=2)
    return {
        **config.to_dict(),
        "calibration": {**calibration, **COUNTS},
        "kvhub_version": "0.1.0",
        "dtype": "float32",
        **changes,
    }


def make_report(about=BUILT_IN, **changes):
    """What report.json holds, with another number in every place."""
    numbers = itertools.count(1)

    def estimate():
        value = next(numbers) / 97
        return Estimate(value, value - 0.0123, value + 0.0321)

    report = Report(
        settings={name: SettingMetrics(*(estimate() for _ in range(5))) for name in SETTINGS},
        retention=estimate(),
        floor_normalized_retention=estimate(),
        gap_recovered=None,
        key_r2=0.8125,
        value_r2=0.7125,
        attention_output_cosine=estimate(),
        layers=Fidelity(*[(0.5,)] * 2, *[((0.5,),)] * 2, (0.5,), ((0.5,),), (1.0,), (None,), ()),
        notes=("3 sequences were too short and are left out.",),
        provenance={
            "mapper": "mine",
            **about,
            "start": 0,
            "sequences": 30,
            "skipped_sequences": 2,
            "prefix_tokens": 5760,
            "scored_tokens": 1890,
            "protocol": {"exact_prefix": 4},
            "versions": {"kvhub": "0.1.0", "torch": "2.13.0"},
        },
    )
    return {**report.to_dict(), **changes}


def render(config=None, report=None, **options):
    return render_card("mine", config or make_config(), report, PLOTS, **options)


def metadata(card):
    return yaml.safe_load(re.match(r"---\n(.*?)^---$", card, re.DOTALL | re.MULTILINE)[1])


def tables(card):
    """Every row of every table, by its first cell."""
    rows = [line for line in card.splitlines() if line.startswith("|")]
    cells = [re.split(r"(?<!\\)\|", row)[1:-1] for row in rows]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in cells}


def block(card, language):
    return re.search(rf"^```{language}\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)[1]


def run_snippet(card):
    """Run the code that the card shows; returns its variables."""
    names = {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(block(card, "python"), names)
    assert out.getvalue().startswith("What both models have read so far.")
    return names


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Two tiny models with a tokenizer in the current folder, and a mapper between them."""
    monkeypatch.chdir(tmp_path)
    for name, layers, seed in (("small", 2, 1), ("large", 3, 2)):
        options = {"vocab_size": 4096, "bos_token_id": 0, "eos_token_id": 0}
        tiny_model("qwen3", layers, seed=seed, **options).save_pretrained(name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            Path(name, file).write_bytes((FAMILY / "large" / file).read_bytes())
    return random_mapper(ModelSpec.from_pretrained("small"), ModelSpec.from_pretrained("large"))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub on the loopback that the client asks."""
    with HubServer(tmp_path / "hub") as server:
        connect_client(monkeypatch, server, tmp_path / "cache")
        close_session()
        yield server
        close_session()


def assert_same_tensors(found, expected):
    for name, tensor in expected.tensors().items():
        assert found.tensors()[name].equal(tensor), name


def test_the_code_in_the_card_of_a_local_mapper_runs(models):
    models.save_pretrained(mapper_path("mine"))
    card = (mapper_path("mine") / "README.md").read_text()
    assert '.from_pretrained("mine")' in card
    names = run_snippet(card)
    assert_same_tensors(names["mapper"], models)


def test_the_code_in_a_published_card_runs(models, hub, tmp_path):
    package = tmp_path / "mine"
    models.save_pretrained(package)
    config = json.loads((package / "config.json").read_text())
    card = render_card("mine", config, None, [], repo_id="org/mine", version="1.0.0")
    (package / "README.md").write_text(card)
    Manifest.of(package).write(package)
    hub.create_repo("org/mine")
    commit = hub.commit("org/mine", {path.name: path.read_bytes() for path in package.iterdir()})
    hub.move_tag("org/mine", "v1.0.0", commit)
    # What was pushed to main since is not what the card loads.
    hub.commit("org/mine", {"config.json": b"{}"})
    assert '.from_pretrained("org/mine", revision="v1.0.0")' in card
    assert_same_tensors(run_snippet(card)["mapper"], models)


def test_models_are_loaded_at_the_commits_that_were_calibrated():
    card = render(repo_id="org/mine", version="v1.2.0", report=make_report())
    code = block(card, "python")
    assert 'from_pretrained("org/mine", revision="v1.2.0")' in code
    for model, commit in zip(("org/small", "org/large"), COMMITS, strict=True):
        assert f'load_model("{model}", revision="{commit}")' in code
    assert "kvhub evaluate org/mine@v1.2.0 --data FILE" in card


def test_the_sections_are_in_the_order_in_which_people_need_them():
    card = render(report=make_report())
    assert re.findall(r"^#+ (.*)$", card, re.MULTILINE) == [
        "mine",
        *("Compatibility", "Quality", "Calibrated on", "Limits", "How to reproduce", "Licence"),
    ]
    assert card.index("```python") < card.index("## Compatibility")


def test_the_hub_accepts_the_card(hub):
    config, report = make_config(DATASET), make_report(DATASET)
    for card in (
        render(),
        render(config, report, repo_id="org/mine", version="1.0.0", license="apache-2.0"),
        render(report=report, license=License("other", "a and b", ("https://a", "https://b"))),
        render(previous="---\nlicense: [mit, gpl\n---\nText"),
    ):
        assert card_errors(card) == []
        ModelCard(card).validate()


def test_the_metadata_is_what_the_hub_searches_and_shows():
    report = make_report(DATASET)
    card = render(
        make_config(DATASET),
        report,
        repo_id="org/mapper",
        version="1.0.0",
        license="apache-2.0",
        new_version="org/better",
    )
    data = metadata(card)
    assert data["base_model"] == ["org/small", "org/large"]
    assert data["base_model_relation"] == "adapter"
    assert data["tags"] == [
        *("kvhub", "kv-cache", "kv-cache-mapping", "qwen3"),
        *("source:org/small", "target:org/large"),
    ]
    assert data["datasets"] == ["HuggingFaceFW/fineweb-edu"]
    expected = {
        "library_name": "kvhub",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "new_version": "org/better",
    }
    assert {key: data[key] for key in expected} == expected

    parsed = ModelCard(card).data
    assert parsed.model_name == "mapper"
    found = {result.metric_name: result.metric_value for result in parsed.eval_results}
    assert all(type(value) is float for value in found.values())
    assert found["Retention: accuracy over the target's own"] == report["retention"]["value"]
    assert found["R2 of keys"] == report["key_r2"]
    kl = report["settings"]["source_alone"]["kl"]["value"]
    assert found["KL divergence from the target, nats per token, source alone"] == kl
    assert "Gap between source and target recovered" not in found  # it is not defined
    [result, *_] = parsed.eval_results
    assert (result.dataset_type, result.dataset_config, result.dataset_revision) == (
        "HuggingFaceFW/fineweb-edu",
        "sample-10BT",
        "d" * 40,
    )
    assert "model-index" not in metadata(render())


PATHS = ["models/small", "./small", "../m/small", "~/m/small", "/home/ann/small", r"C:\m\small"]


@pytest.mark.parametrize("path", PATHS)
def test_a_local_path_is_no_metadata_and_says_nothing_about_its_owner(path):
    config = make_config(
        {**BUILT_IN, "data": "my.jsonl", "kind": "files"},
        source_model_id=path,
        source_revision=None,
    )
    card = render(config, make_report({"data": "my.jsonl", "kind": "files"}), repo_id="org/mine")
    data = metadata(card)
    assert data["base_model"] == ["org/large"]
    assert [tag for tag in data["tags"] if ":" in tag] == ["target:org/large"]
    assert "datasets" not in data
    assert "small" not in json.dumps(data)
    assert "/home" not in card
    assert "C:" not in card
    assert "small` is a folder of the author's" in card
    both = make_config(
        source_model_id=path, source_revision=None, target_model_id=path, target_revision=None
    )
    assert not metadata(render(both)).keys() & {"base_model", "base_model_relation"}


def test_the_compatibility_table_says_what_the_config_says():
    llama = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    rope = replace(
        spec().rope,
        rope_type="llama3",
        rope_theta=5e5,
        parameters=tuple(sorted(llama.items())),
        attention_scaling=1.25,
    )
    rows = tables(render(make_config(target_rope=rope, target_qk_norm=False)))
    assert rows["commit"] == list(COMMITS)
    assert rows["family"] == ["qwen3", "qwen3"]
    assert rows["layers"] == ["3", "4"]
    assert rows["KV heads"] == ["2", "2"]
    assert rows["head dim"] == ["4", "4"]
    assert rows["RoPE type"] == ["default", "llama3"]
    assert rows["RoPE theta"] == ["1000000", "500000"]
    scaling = "factor 8, original_max_position_embeddings 8192, rope_type llama3"
    assert rows["RoPE scaling"] == ["none", f"{scaling}, attention scaling 1.25"]
    assert rows["QK-norm"] == ["yes", "no"]
    assert rows["tokenizer (sha256)"] == ["0" * 64] * 2


def test_the_gate_is_shown_with_its_reasons():
    report = make_report()
    assert "Quality gate" not in render(report=report)
    result = check_gate(Report.from_dict(report), Gate(min_key_r2=0.9))
    card = render(report={**report, "gate": result.to_dict()})
    assert "Quality gate: **not met**" in card
    assert "| key r2 | 0.812 | at least 0.9 | **no** | Keys far worse than a constant" in card
    assert "at most 1" in card


def test_the_figures_are_those_of_the_report():
    report = make_report()

    def shown(estimate):
        value, low, high = (f"{estimate[key]:.3f}" for key in ("value", "low", "high"))
        return f"{value} [{low}, {high}]"

    card = render(report=report)
    rows = tables(card)
    for setting, metrics in report["settings"].items():
        keys = ("nll", "accuracy", "kl", "agreement")
        assert rows[setting.replace("_", " ")] == [shown(metrics[key]) for key in keys]
    assert rows["retention: accuracy over the target's own"] == [shown(report["retention"])]
    assert rows["retention above no context"] == [shown(report["floor_normalized_retention"])]
    assert rows["gap between source and target recovered"] == ["not defined here"]
    assert rows["attention-output cosine"] == [shown(report["attention_output_cosine"])]
    assert rows["R2 of keys"] == ["0.812"]
    source, target = (
        report["settings"][name]["accuracy"]["value"] for name in ("source_alone", "target_alone")
    )
    assert rows["the same of source alone"] == [f"{source / target:.3f}"]
    assert "- 3 sequences were too short" in card
    assert "![fidelity per layer](plots/fidelity%20per%20layer.png)" in card
    assert "evaluated with kvhub 0.1.0, torch 2.13.0" in card


def captured(monkeypatch, function, command):
    """What a command hands to the function behind it, which does not run."""
    calls = []
    monkeypatch.setattr(function, lambda *args, **options: calls.append((args, options)))
    arguments = shlex.split(command.replace("\\\n", ""))
    assert arguments.pop(0) == "kvhub"
    result = CliRunner().invoke(app, arguments)
    assert len(calls) == 1, result.output
    return calls[0]


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.0, "keys by Gauss-Newton, values as they were."),
        (0.5, "keys by Gauss-Newton, values 50% of the way to the best ones."),
    ],
)
def test_the_card_says_how_far_a_mapper_is_aligned(share, expected):
    ridge = {"lambda": 1e-3, "scale": "relative", "tokens": 9, "features": 8}
    plain = render(make_config(ridge=ridge))
    aligned = render(make_config(ridge=ridge | {"alignment": {"value_share": share}}))
    assert expected in " ".join(aligned.split())
    assert "Gauss-Newton" not in plain


@pytest.mark.parametrize(
    ("calibration", "data"),
    [
        (BUILT_IN, "stdlib"),
        (DATASET, f"HuggingFaceFW/fineweb-edu:sample-10BT@{'d' * 40}"),
        ({"data": "it's mine.jsonl", "kind": "files"}, "it's mine.jsonl"),
    ],
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "heads": "matched",
            "top_k": 1,
            "selection_method": "greedy",
            "weighting": "attention",
            "dtype": "bfloat16",
            "ridge": {"lambda": 1.5e-07, "scale": "per_token", "tokens": 9, "features": 8}
            | {"alignment": {"lambdas": [0.1]}},
            "source_model_id": "examples/a b/small",
            "source_revision": None,
        },
    ],
)
def test_the_command_makes_a_mapper_of_this_config(monkeypatch, calibration, data, changes):
    config = make_config(calibration, **changes)
    command = block(render(config), "sh")
    (plan, *_), _ = captured(monkeypatch, "kvhub.fitting.fit_mapper", command)
    assert {
        "name": plan.name,
        "source": plan.source,
        "target": plan.target,
        "data": plan.data,
        **{key: getattr(plan, key) for key in ("sequences", "length", "stride")},
        **{key: getattr(plan, key) for key in ("top_k", "heads", "weighting", "dtype")},
        "selection_method": plan.selection,
        "lambda": plan.ridge_lambda,
        "scale": plan.lambda_scale,
        "align": plan.align,
    } == {
        "name": "mine",
        "source": config["source"]["model_id"],
        "target": config["target"]["model_id"],
        "data": data,
        **{key: COUNTS[key] for key in ("sequences", "length", "stride")},
        **{key: config[key] for key in ("top_k", "heads", "weighting", "dtype")},
        "selection_method": config["selection_method"],
        **{key: config["ridge"][key] for key in ("lambda", "scale")},
        "align": "alignment" in config["ridge"],
    }
    # Nothing is left to a default, which may change.
    assert len(plan.explicit) == 14


@pytest.mark.parametrize(
    ("about", "start", "data"),
    [
        ({**BUILT_IN, "data": "stdlib-held-out"}, 0, None),
        (BUILT_IN, 128, None),
        ({"data": "my text.jsonl", "kind": "files"}, 0, "my text.jsonl"),
        (DATASET, 0, f"HuggingFaceFW/fineweb-edu:sample-10BT@{'d' * 40}"),
    ],
)
def test_the_second_command_makes_the_report(monkeypatch, about, start, data):
    report = make_report(about)
    report["provenance"]["start"] = start
    command = block(render(report=report), "sh")
    command = command[command.index("kvhub evaluate") :]
    (mapper, *_), options = captured(monkeypatch, "kvhub.pipeline.evaluate_mapper", command)
    assert mapper == "mine"
    assert (options["data"], options["sequences"], options["exact_prefix"]) == (data, 32, 4)


def test_a_command_that_would_make_something_else_is_not_shown():
    for calibration in ({}, {"data": ["a", "b"]}, {**BUILT_IN, "held_out_every": 5}):
        config = {**make_config(), "calibration": {**COUNTS, **calibration}}
        assert "fitted from Python" in render(config)
    assert "fitted from Python" in render(make_config(dtype="float64"))
    assert "fitted from Python" not in render()
    assert block(render(command="python fit.py"), "sh") == "python fit.py\n"


OWN = """\
---
language: [en, no]
tags: [finance, kvhub, 2024]
license: other
license_name: house-rules
license_link: LICENSE
new_version: org/successor
base_model: somebody/else
tested_with: 1.10
---
Above.

<!-- kvhub:begin -->
Old.
<!-- kvhub:end -->
    indented below

"""


def test_what_people_wrote_stays():
    card = render(previous=OWN)
    body = card.split("---\n", 2)[2]
    assert body.startswith(f"\nAbove.\n\n{BEGIN}")
    assert body.endswith(f"{END}\n\n    indented below\n")
    assert "Old." not in card
    assert "\nlanguage: [en, no]\n" in card
    assert "\ntested_with: 1.10\n" in card
    data = metadata(card)
    assert data["base_model"] == ["org/small", "org/large"]
    assert {"finance", "2024", "kvhub", "target:org/large"} < set(data["tags"])
    assert len(data["tags"]) == len(set(data["tags"])) == 8
    assert data["new_version"] == "org/successor"
    assert [data[key] for key in ("license", "license_name", "license_link")] == [
        *("other", "house-rules", "LICENSE")
    ]
    assert metadata(render(previous=OWN, license="mit"))["license"] == "mit"
    assert "license_name" not in metadata(render(previous=OWN, license="mit"))
    assert metadata(render(previous=OWN, license="other"))["license_name"] == "house-rules"
    assert metadata(render(previous=OWN, new_version="org/b"))["new_version"] == "org/b"


def test_figures_and_models_of_an_earlier_version_do_not_stay():
    before = render(make_config(DATASET), make_report(DATASET), repo_id="org/m", version="1.0.0")
    config = make_config(source_model_id="org/tiny")
    card = render(config, repo_id="org/m", version="2.0.0", previous=before)
    assert card == render(config, repo_id="org/m", version="2.0.0")
    assert "v1.0.0" not in card


MALFORMED = [
    "Text only.",
    f"{BEGIN}\nfirst\n",
    f"first\n{END}\nsecond",
    f"{END}\nfirst\n{BEGIN}\nsecond",
    f"{BEGIN}\nfirst\n{BEGIN}\nsecond\n{END}\nthird",
    f"{BEGIN}\nfirst\n{END}\nsecond\n{END}",
    f"first\n  {END}{BEGIN}{END} second\n{BEGIN}",
    "---\nlicense: mit\n\nno end of it",
    "\ufeff---\r\nlicense: mit\r\n---\r\nfirst\r\n\r\nsecond\r\n",
    "",
    "---\n---\n",
]


@pytest.mark.parametrize("previous", MALFORMED)
def test_without_sound_markers_all_of_the_body_stays(previous):
    card = render(previous=previous)
    assert card.count(BEGIN) == card.count(END) == 1
    below = card.split(END)[1]
    for word in re.findall(r"Text only\.|first|second|third|no end of it", previous):
        assert word in below
    assert render(previous=card) == card
    assert card_errors(card) == []


@pytest.mark.parametrize(
    "bad",
    [
        "license: [mit",
        "- a\n- list",
        "just words",
        "? [a, b]\n: c",
        "on: !!bool maybe",
        "day: 2024-13-45",
        "x: !!timestamp never",
        "deep: " + "[" * 500 + "]" * 500,
        f"a: ]\n{BEGIN}",
        "tag: !!python/object:os.system {}",
        "a: `b` ```` c",
    ],
)
def test_metadata_that_cannot_be_read_stays_as_text(bad):
    card = render(previous=f"---\n{bad}\n---\n\nAbove\n{BEGIN}\nOld.\n{END}\nBelow")
    assert bad.replace(f"\n{BEGIN}", "") in card.split(END)[1]
    assert "Old." not in card
    assert "Above" in card.split(BEGIN)[0]
    assert metadata(card) == metadata(render())
    assert render(previous=card) == card


def test_keys_given_twice_or_by_reference_stay_valid():
    previous = "---\na: &x [1, 2]\nlicense: &y mit\nb: *x\nc: *y\na: 3\n---\n"
    data = metadata(render(previous=previous))
    assert (data["a"], data["b"], data["c"], data["license"]) == (3, [1, 2], "mit", "mit")


def test_any_card_gives_a_fixed_point_that_loses_nothing():
    chance = random.Random(0)
    pieces = [BEGIN, END, "", "```", "---", "| a | b |", f"  {BEGIN} same line", f"{END}{BEGIN}"]
    for _ in range(60):
        words = (f"word{number}" for number in itertools.count())
        lines = [
            chance.choice([*pieces, next(words), next(words)]) for _ in range(chance.randrange(12))
        ]
        if chance.random() < 0.7:
            lines = ["---", "own: key", "---", *lines]
        previous = "\n".join(lines)
        card = render(previous=previous)
        assert card.count(f"\n{BEGIN}\n") == card.count(f"\n{END}\n") == 1, previous
        assert render(previous=card) == card, previous
        # What stands between two markers is kvhub's; all else has to be there.
        kept = re.sub(
            rf"^[ \t]*{BEGIN}(?:(?!{BEGIN}|{END}).)*^[ \t]*{END}",
            "",
            previous,
            flags=re.DOTALL | re.MULTILINE,
        )
        own = card.split(BEGIN)[0] + card.split(END, 1)[1]
        assert set(re.findall(r"word\d+", kept)) <= set(re.findall(r"word\d+", own)), previous


HOSTILE = [
    "a | b `c` ``d`` | e",
    f"x\n{END}\n---\nlicense: mit\n# Title",
    "</td><script>alert(1)</script> [x](javascript:y) ![z](u)",
    '"quotes" \' and \\ back\\|slash \x00\x1b[31m\u2028 {curly} %s ```',
    "key: value # no comment\t- 'x",
]


def render_with(name, previous=None):
    """A card with this name, or text, in every place that holds one."""
    config = make_config(
        {**BUILT_IN, "data": name, name: name, "list": [name, 1], "kind": "files"},
        source_model_id=name,
        source_model_type=name,
        source_tokenizer_digest=name,
        target_model_id=f"org/{name} x",
    )
    report = make_report({"data": name, "kind": "dataset", "revision": name}, notes=[name])
    license = License("other", name, (name,))
    return render_card(name, config, report, [f"{name}.png"], license=license, previous=previous)


@pytest.mark.parametrize("bad", HOSTILE)
def test_names_and_data_cannot_break_out_of_their_place(bad):
    card, harmless = render_with(bad), render_with("harmless")
    assert card_errors(card) == []
    assert metadata(card).keys() == metadata(harmless).keys()
    # Every line is of the same kind as with a harmless name, whatever stands in it.
    lines, expected = (
        re.sub(r"\\\n *", " ", text.split("\n---\n", 1)[1]).splitlines()
        for text in (card, harmless)
    )
    assert len(lines) == len(expected)
    for line, like in zip(lines, expected, strict=True):
        assert re.match(r"\W{0,3}", line)[0][:1] == re.match(r"\W{0,3}", like)[0][:1], line
        if like.startswith("|"):
            # In a table, a bar with an odd number of backslashes before it is text.
            bars = r"(?<!\\)(?:\\\\)*\|"
            assert len(re.findall(bars, line)) == len(re.findall(bars, like)), line
    body = re.sub("```.*?```|`[^`]+`", "", "\n".join(lines), flags=re.DOTALL)
    assert not re.search(r"(?<!\\)<(script|/td)", body)
    assert render_with(bad, previous=card) == card
    assert read_own_text(card).below == ""


MIT, APACHE = License("mit"), License("apache-2.0")
LLAMA = License("llama3.1", links=("https://llama",))
GEMMA = License("gemma", links=("https://gemma",))
QWEN = License("other", "qwen", ("https://qwen/7b",))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (MIT, MIT, MIT),
        (MIT, APACHE, APACHE),
        (License("bsd-3-clause"), MIT, License("bsd-3-clause")),
        (APACHE, LLAMA, LLAMA),
        (QWEN, MIT, QWEN),
        (QWEN, replace(QWEN, links=("https://qwen/14b",)), QWEN),
        (License("cc-by-nc-4.0"), License("isc"), License("cc-by-nc-4.0")),
        (None, MIT, None),
        (None, LLAMA, None),
        (None, None, None),
    ],
)
def test_the_stricter_licence_holds(first, second, expected):
    assert stricter_license(first, second) == expected
    assert getattr(stricter_license(second, first), "label", None) == getattr(
        expected, "label", None
    )


def test_two_restrictive_licences_hold_both():
    both = stricter_license(LLAMA, GEMMA)
    assert both == License("other", "llama3.1 and gemma", ("https://llama", "https://gemma"))
    card = render(license=both)
    data = metadata(card)
    assert (data["license"], data["license_name"]) == ("other", "llama3.1 and gemma")
    section = card.split("## Licence")[1]
    assert "<https://llama>" in section
    assert "<https://gemma>" in section
    assert "Built with Llama" in section
    # The next push, which may not know them, loses neither.
    assert render(previous=card) == card


def test_the_licence_of_a_model_is_read_from_its_card():
    of = License.of_model
    assert of("org/m", {"license": "MIT"}) == License(
        "mit", None, ("https://huggingface.co/org/m",)
    )
    card = {"license": "other", "license_name": "own", "license_link": "LICENSE"}
    assert of("org/m", card) == License(
        "other", "own", ("https://huggingface.co/org/m/blob/main/LICENSE",)
    )
    assert of("org/m", {**card, "license_link": "https://own"}).links == ("https://own",)
    for unknown in ({}, {"license": None}, {"license": "unknown"}, {"license": ["mit", "gpl"]}):
        assert of("org/m", unknown) is None


def test_the_card_says_which_duties_a_licence_brings():
    assert "not known here" in render()
    assert "license" not in metadata(render())
    duties = "Built with Llama", "Llama 3.1 Community License", "as this one's does not"
    card = render(license="llama3.1", repo_id="org/mine")
    assert all(text in card for text in duties)
    named = render(license="llama3.1", repo_id="org/Llama-mine")
    assert [text in named for text in duties] == [True, True, False]
    assert "Built with Meta Llama 3.**" in render(license="llama3")
    assert "Built with" not in render(license="llama2") + render(license="mit")
    assert "LLAMA 2" in render(license="llama2").upper()


def test_the_card_of_a_saved_mapper_needs_nothing_but_its_config(tmp_path):
    mapper = KVMapper(
        replace(random_mapper(spec(3), spec(4)).config, calibration={}, quality={}),
        random_mapper(spec(3), spec(4)).tensors(),
    )
    mapper.save_pretrained(tmp_path / "mine")
    assert "Not recorded." in (tmp_path / "mine" / "README.md").read_text()


def test_cards_need_no_torch():
    code = "import kvhub.cards, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "kvhub.cards.card" in loaded
    assert not {"torch", "transformers", "huggingface_hub"} & set(loaded)
