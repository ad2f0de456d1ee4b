"""The main job on the embedded pair, as `make demo` runs it: every command is printed first."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "demo-output"
MAPPER = "tiny-middle-to-large"


def run(*command: str) -> None:
    print(f"\n$ {' '.join(command)}", flush=True)
    executable = Path(sys.executable).parent / command[0]
    environment = {**os.environ, "KVHUB_HOME": str(OUTPUT), "HF_HUB_OFFLINE": "1"}
    subprocess.run([executable, *command[1:]], check=True, cwd=ROOT, env=environment)


def main() -> None:
    started = time.monotonic()
    OUTPUT.mkdir(exist_ok=True)
    # The first lines of a module that the embedded models never saw in training.
    lines = Path(textwrap.__file__).read_text(encoding="utf-8").splitlines(keepends=True)
    (OUTPUT / "prompt.py").write_text("".join(lines[:24]), encoding="utf-8")

    run("kvhub", "check", MAPPER)
    run("kvhub", "fit", MAPPER, "--overwrite")
    run("kvhub", "evaluate", MAPPER)
    run("kvhub", "info", MAPPER)
    run("kvhub", "verify", MAPPER)
    prompt = "demo-output/prompt.py"
    run("kvhub", "handoff", MAPPER, "--prompt-file", prompt, "--max-new-tokens", "28")
    run("kvhub", "bench", MAPPER, "--lengths", "256,1024")
    run("python", "examples/02_load_and_hand_off.py", MAPPER)

    print(f"\nDone in {time.monotonic() - started:.0f} s. The mapper, its report, its card and its")
    print(f"plots are in demo-output/mappers/{MAPPER}.")


if __name__ == "__main__":
    main()
