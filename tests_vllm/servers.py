"""vLLM's OpenAI server on the loopback, in the environment that has vLLM and no kvhub."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

START_SECONDS = 900
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # The first request for log probabilities would wait for a C++ compiler, if there is one.
    "TORCHDYNAMO_DISABLE": "1",
}


def python() -> str:
    """Of the environment with vLLM."""
    return os.environ["KVHUB_VLLM_PYTHON"]


def environment(directory: Path | None) -> dict[str, str]:
    """Without anything of this process's Python, and with an exported directory."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    path = {} if directory is None else {"PYTHONPATH": str(directory)}
    return {**kept, **ENVIRONMENT, **path}


class Server:
    """A running server; `ready` waits until it answers.

    Parameters
    ----------
    model
        The model's directory.
    directory
        An exported one.
    transfer
        The content for `--kv-transfer-config`.
    log
        Where its output goes.
    """

    def __init__(
        self, model: Path, directory: Path, transfer: dict[str, Any], log: Path, *options: str
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.model, self.log = str(model), log
        command = [
            *(python(), "-m", "vllm.entrypoints.openai.api_server", "--model", self.model),
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"),
            *("--block-size", "32", "--max-model-len", "1024", "--enforce-eager"),
            *("--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer)),
            *options,
        ]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(directory),
                start_new_session=True,  # so that its children can be ended with it
            )

    def ready(self) -> "Server":
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=5):
                    return self
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        raise RuntimeError(f"No server came up:\n{self.log.read_text()[-4000:]}")

    def complete(self, tokens: list[int], count: int = 16, **fields: Any) -> dict[str, Any]:
        """Greedy tokens behind a prompt of tokens: see `_greedy`."""
        return self._greedy("/v1/completions", count, prompt=tokens, **{"logprobs": 2, **fields})

    def chat(
        self, messages: list[dict[str, str]], count: int = 16, **fields: Any
    ) -> dict[str, Any]:
        """The same behind the messages of a chat."""
        asked = {"messages": messages, "logprobs": True, "top_logprobs": 2, **fields}
        return self._greedy("/v1/chat/completions", count, **asked)

    def _greedy(self, path: str, count: int, **fields: Any) -> dict[str, Any]:
        """What is answered.

        Returns
        -------
        answer
            `prompt` and `tokens`, as ids; `text`; the two best tokens of each and their log
            probabilities, as `best`; how many of the prompt were `cached`; what `kvhub` says.
        """
        answer = self._post(
            path,
            max_tokens=count,
            temperature=0.0,
            ignore_eos=True,
            return_token_ids=True,
            return_tokens_as_token_ids=True,
            **fields,
        )
        (choice,) = answer["choices"]
        details = answer["usage"].get("prompt_tokens_details") or {}
        message = choice.get("message")
        return {
            "prompt": answer["prompt_token_ids"] if message else choice["prompt_token_ids"],
            "tokens": choice["token_ids"],
            "text": message["content"] if message else choice["text"],
            "best": _best(choice["logprobs"] or {}),
            "cached": details.get("cached_tokens") or 0,
            "kvhub": (answer.get("kv_transfer_params") or {}).get("kvhub"),
        }

    def kill(self) -> None:
        """End it and its children at once, as a crash does."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _post(self, path: str, **body: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            self._url + path,
            json.dumps({"model": self.model, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            answer: dict[str, Any] = json.load(response)
        return answer


def _best(logprobs: dict[str, Any]) -> list[dict[int, float]]:
    """By token, per position, the best first: of a completion or of a chat."""
    found = logprobs.get("top_logprobs") or [
        {entry["token"]: entry["logprob"] for entry in position["top_logprobs"]}
        for position in logprobs.get("content") or []
    ]
    rows = []
    for position in found:
        ranked = sorted(position.items(), key=lambda item: -item[1])
        rows.append({int(name.removeprefix("token_id:")): value for name, value in ranked})
    return rows
