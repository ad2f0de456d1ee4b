"""One engine in a process: the interface, the layout, and what servers do not show."""

import json
import subprocess
from pathlib import Path

import pytest
from conftest import FAMILY, TINY, Deployed, offline, text_tokens
from reference import handed_off, own, require_equal
from servers import environment, python

ROOT = Path(__file__).parents[1]


@pytest.fixture
def fresh(deployed, tmp_path):
    """Deployments with a store of this test."""
    return {name: _in(found, tmp_path) for name, found in deployed.items()}


def _in(found, root):
    made = object.__new__(Deployed)
    made.__dict__ |= found.__dict__ | {
        "root": root,
        "store": root / "store",
        "log": root / f"{found.name}.jsonl",
    }
    return made


def run(*arguments, path=None):
    done = subprocess.run(
        [python(), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environment(path),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_record_is_of_the_installed_version():
    found = json.loads(run(ROOT / "tests" / "record_vllm.py"))
    assert found == json.loads((ROOT / "tests" / "vllm_interface.json").read_text())


def test_blocks_are_as_vllms_operator_packs_them(deployed):
    assert " equal, " in run(Path(__file__).with_name("packing.py"), path=deployed["large"].path)


def test_the_self_test_passes(deployed, tmp_path):
    found = deployed["large"].path
    settings = json.loads((found / "settings.json").read_text())
    settings |= {"store": {**settings["store"], "path": str(tmp_path / "s")}}
    settings |= {"staging_path": str(tmp_path / "stage")}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    models = [part for name in TINY for part in ("--model", FAMILY / name)]
    output = run(
        *(
            "-c",
            "import os, runpy, sys; os.environ['TLLM_KVHUB_SETTINGS'] = sys.argv.pop(1);"
            " sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')",
        ),
        *(tmp_path / "settings.json", found / "selftest.py", *models),
    )
    assert "failed" not in output


def test_a_models_own_states_are_saved_and_loaded(fresh):
    """Identity: no map is in the way, and the tokens are those of its own prefill."""
    found, prompt = fresh["large"], text_tokens()[:200]
    (first,) = offline("large", [[{"tokens": prompt}]], found, transfer=found.transfer())
    require_equal(first[0]["tokens"], own("large", prompt), "large", prompt)
    again = offline(
        "large",
        [[{"tokens": prompt, "salt": found.salt}]],
        found,
        transfer=found.transfer(),
        counters=True,
    )
    assert again[0][0]["tokens"] == first[0]["tokens"]
    assert again[0][0]["cached"] == 192
    assert again[0][0]["params"]["kvhub"]["exact_tokens"] == 192
    assert again[1][1]["applied"] == 1
    late = offline(
        "large",
        [[{"tokens": prompt, "salt": found.salt}]],
        found,
        transfer=found.transfer(lookup_seconds=1e-9),
        counters=True,
    )
    assert (late[0][0]["tokens"], late[0][0]["cached"]) == (first[0]["tokens"], 0)
    assert late[0][0]["params"]["kvhub"]["status"] == "fallback_reprefill"
    assert late[1][0]["miss: late"] > 0


def require_as_said(answer, prompt):
    """As the hand-off of as many tokens as the answer says: preemption may leave fewer to load."""
    said = answer["params"]["kvhub"]
    assert (said["status"] == "applied") == (said["mapped_tokens"] > 0)
    assert said["exact_tokens"] == 0
    wanted = own("large", prompt, 48)
    if said["mapped_tokens"]:
        wanted = handed_off("large", prompt, said["mapped_tokens"], 48)
    require_equal(answer["tokens"], wanted, "large", prompt, said["mapped_tokens"])


def test_chunked_prefill_preemption_and_failed_loads(fresh):
    """A small pool and small steps: requests lose their blocks, and come again."""
    source, target = fresh["large"], fresh["large"]
    prompts = [text_tokens()[start : start + 200] for start in (3000, 3300, 3600)]
    small = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True, "max_model_len": 320}
    offline(
        "middle",
        [[{"tokens": prompt, "count": 1} for prompt in prompts]],
        source,
        transfer=source.transfer("source"),
        options=small,
    )
    asked = [{"tokens": prompt, "salt": target.salt, "count": 48} for prompt in prompts]
    answers = offline(
        "large",
        [asked],
        target,
        transfer=target.transfer(),
        # One of them is never used; three requests need 21 for their prompts, 24 at their ends.
        options={**small, "num_gpu_blocks_override": 23},
        counters=True,
    )
    for prompt, answer in zip(prompts, answers[0], strict=True):
        require_as_said(answer, prompt)
    assert answers[1][0]["preempted"] > 0
    faulty = {**target.transfer(), "kv_connector_module_path": "faulty"}
    path = f"{target.path}:{Path(__file__).parent}"
    answers = offline(
        "large", [asked], type("Path", (), {"path": path}), transfer=faulty, counters=True
    )
    states = [answer["params"]["kvhub"]["status"] for answer in answers[0]]
    assert {*states} == {"applied", "fallback_reprefill"}
    for prompt, answer in zip(prompts, answers[0], strict=True):
        require_as_said(answer, prompt)
    assert target.status()[-1]["reason"] in ("", "its states could not be loaded")
