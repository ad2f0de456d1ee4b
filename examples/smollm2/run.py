"""The main job on a real language model: SmolLM2-135M-Instruct and a pruned copy of it.

python examples/smollm2/make_models.py && python examples/smollm2/run.py
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "demo-output"
PROMPT = """\
The Amazon is the largest rainforest in the world. It covers about 5.5 million square kilometres, \
most of it in Brazil, and smaller parts in Peru, Colombia, Venezuela, Ecuador and Bolivia. The \
forest is home to more species of plants and animals than any other place on land. Its rivers \
carry more water than those of any other basin, and the largest of them, the Amazon River, flows \
from the Andes to the Atlantic Ocean. In short, most of the forest lies in the country of"""


def run(*command: str) -> None:
    print(f"\n$ {' '.join(command)}", flush=True)
    executable = Path(sys.executable).parent / command[0]
    environment = {**os.environ, "KVHUB_HOME": str(OUTPUT), "HF_HUB_OFFLINE": "1"}
    subprocess.run([executable, *command[1:]], check=True, cwd=ROOT, env=environment)


def main() -> None:
    started = time.monotonic()
    OUTPUT.mkdir(exist_ok=True)
    (OUTPUT / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    statistics = "demo-output/smollm2.statistics"
    run("kvhub", "check", "smollm2")
    run("kvhub", "fit", "smollm2", "--overwrite", "--statistics", statistics)
    run("kvhub", "evaluate", "smollm2")
    prompt = ("--prompt-file", "demo-output/prompt.txt", "--max-new-tokens", "24")
    run("kvhub", "handoff", "smollm2", *prompt)
    run("kvhub", "bench", "smollm2", "--lengths", "256,1024,2048", "--repeats", "3")
    print("\nAnother number of source layers from the same statistics, with no model loaded:")
    matched = ("--name", "smollm2-matched", "--heads", "matched", "--top-k", "8", "--overwrite")
    run("kvhub", "fit", "smollm2", *matched, "--statistics", statistics)
    run("kvhub", "evaluate", "smollm2-matched")
    print(f"\nDone in {time.monotonic() - started:.0f} s.")


if __name__ == "__main__":
    main()
