"""The main job on the embedded pair, as `make demo` runs it: every command is printed first."""

import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "demo-output"
MAPPER = "tiny-middle-to-large"


OFFLINE = {"KVHUB_HOME": str(OUTPUT), "HF_HUB_OFFLINE": "1"}


def run(*command: str, settings: dict[str, str] = OFFLINE) -> None:
    print(f"\n$ {' '.join(command)}", flush=True)
    executable = Path(sys.executable).parent / command[0]
    environment = {**os.environ, **settings}
    subprocess.run([executable, *command[1:]], check=True, cwd=ROOT, env=environment)


@contextmanager
def local_hub() -> Iterator[dict[str, str]]:
    """Settings for a Hub on this machine, the one that the tests use, empty at first."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.hub_server", "--root", f"{folder}/hub"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
            try:
                endpoint = server.stdout.readline().strip().removeprefix("HF_ENDPOINT=")
                yield {
                    "KVHUB_HOME": str(OUTPUT),
                    "HF_ENDPOINT": endpoint,
                    "HF_HOME": f"{folder}/home",
                    "HF_TOKEN": "any",
                }
            finally:
                server.terminate()


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

    print("\nThe same mapper through a Hub, here one on this machine:")
    repository = f"demo/{MAPPER}"
    with local_hub() as settings:
        run("kvhub", "push", MAPPER, "--repo-id", repository, settings=settings)
        run("kvhub", "versions", repository, settings=settings)
        run("kvhub", "pull", f"{repository}@^1.0", settings=settings)
        run("python", "examples/02_load_and_hand_off.py", repository, settings=settings)

    print(f"\nDone in {time.monotonic() - started:.0f} s. The mapper, its report, its card and its")
    print(f"plots are in demo-output/mappers/{MAPPER}.")


if __name__ == "__main__":
    main()
