"""What the README says can be typed: its commands and its Python run as they stand."""

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

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
    environment = {**os.environ, "KVHUB_HOME": str(tmp_path)}
    ran = []
    for command in commands():
        if command[0] != "kvhub" or not any("tiny" in word for word in command):
            continue
        executable = Path(sys.executable).parent / "kvhub"
        done = subprocess.run(
            [executable, *command[1:]],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        ran.append(command[1])
    assert ran == ["check", "fit", "evaluate", "handoff", "bench"]
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
        elif not any("tiny" in word for word in command):
            monkeypatch.setattr(sys, "argv", command)
            with pytest.raises(SystemExit) as stopped:
                cli.main()
            assert stopped.value.code == 5, (command, capsys.readouterr().err)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", README):
        assert (ROOT / target).exists(), target
