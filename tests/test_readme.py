"""What the README says can be typed: its commands and its Python run as they stand."""

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hub_server import HubServer

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands():
    lines = "\n".join(blocks("sh")).splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


@pytest.mark.slow
def test_the_embedded_pair_from_commands_to_python(tmp_path):
    """In the README's order, in one store; `make` itself is what runs this test."""
    environment = {**os.environ, "KVHUB_HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf")}
    ran = []
    with HubServer(tmp_path / "hub") as hub:
        environment |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": "any", "HF_HUB_OFFLINE": "0"}
        for command in commands():
            if command[0] == "kvhub" and ("--frozen" in command or "tiny" in " ".join(command)):
                ran.append(command[1])
                folder = tmp_path if command[1] in ("lock", "sync", "export") else ROOT
                done = subprocess.run(
                    [Path(sys.executable).parent / "kvhub", *command[1:]],
                    cwd=folder,
                    env=environment,
                    capture_output=True,
                    text=True,
                    check=False,
                )
                assert done.returncode == 0, f"{command}: {done.stderr}"
    life = ["push", "versions", "pull", "diff", "lock", "sync", "export"]
    assert ran == ["check", "fit", "evaluate", "handoff", "bench", *life]
    (snippet,) = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", snippet],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def main():")


def test_other_commands_name_real_options(capsys, monkeypatch):
    """Models on the Hub cannot be had here, but every command must parse as far as that."""
    from kvhub import cli

    for command in commands():
        if command[0] == "make":
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            assert f"\n{command[1]}:" in makefile
        elif command[:2] == ["python", "-m"]:
            assert find_spec(command[2]) is not None
        elif "--frozen" not in command and "tiny" not in " ".join(command):
            monkeypatch.setattr(sys, "argv", command)
            with pytest.raises(SystemExit) as stopped:
                cli.main()
            assert stopped.value.code == 5, (command, capsys.readouterr().err)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", README):
        assert (ROOT / target).exists(), target
