"""What became of each request, and counters: in the log, in memory and, if asked for, in a file.

The three states and their names are those of the vLLM semantic router's contract.
"""

import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

__all__ = ["APPLIED", "FALLBACK", "UNSUPPORTED", "Status", "contained"]

APPLIED = "applied"  # mapped or exact states of the store are in the engine
FALLBACK = "fallback_reprefill"  # the engine computes the prompt itself
UNSUPPORTED = "unsupported"  # a request that kvhub never serves
LOG = logging.getLogger("kvhub")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Status:
    """Counters of one engine process, and the states of its requests.

    Parameters
    ----------
    file
        A line of JSON is added to it for each request; None for none. Processes may share it.
    """

    def __init__(self, file: str | None = None) -> None:
        self.file = file
        self.counters: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self.counters[name] += number

    def request(self, name: int | str, state: str, reason: str, **numbers: int) -> None:
        """Say what became of a request, once it is certain."""
        self.count(state)
        for key, number in numbers.items():
            self.count(key, number)
        if reason:
            self.count(f"{state}: {reason}")
        LOG.info("request %s: %s%s %s", name, state, f" ({reason})" if reason else "", numbers)
        self._write({"request": name, "state": state, "reason": reason, **numbers})

    def failure(self, what: str, error: Exception) -> None:
        """Note an error that was contained: the request goes on without kvhub."""
        self.count(f"error: {what}")
        # Its text: a record that somebody keeps must not keep what the error refers to.
        LOG.warning("%s: %s: %s", what, type(error).__name__, str(error))

    def _write(self, line: dict[str, object]) -> None:
        if self.file is None:
            return
        text = json.dumps({"time": time.time(), "pid": os.getpid(), **line}) + "\n"
        try:
            # One write to the end: lines of several processes do not mix.
            opened = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(opened, text.encode())
            finally:
                os.close(opened)
        except OSError as error:
            self.count("error: status file")
            LOG.warning("The status file %s cannot be written: %s", self.file, error)


def contained(default: Callable[[], Any]) -> Callable[..., Any]:
    """Log and count what a method raises, and return `default()` in its place.

    The method is one of an object with a `status`.
    """

    def decorate(method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @wraps(method)
        def call(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
            try:
                return method(*args, **options)
            except Exception as error:  # out of here it would end the engine's loop
                owner: Any = args[0]
                owner.status.failure(method.__name__, error)
                LOG.debug("%s", method.__name__, exc_info=True)
                result: Result = default()
                return result

        return call

    return decorate
