"""How `gpu.py` spends its time: a budget, CUDA events or a wall clock, and what they found."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from kvhub import console

MIN_RUNS, MAX_RUNS = 3, 20
FLUSH_BYTES = 2**30  # far more than any L2, and few fills to hold the device for a while
# Launching may take longer in one run than in the one that was timed.
HOLD = 1.5


@dataclass
class Budget:
    """The seconds that are left, and what was skipped for want of them.

    Attributes
    ----------
    total
        Seconds from now.
    reserve
        Seconds at the end that only the last section may use.
    """

    total: float
    reserve: float
    skipped: list[str] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.start + self.total - time.monotonic()

    def allows(self, seconds: float, what: str, *, last: bool = False) -> bool:
        """Whether that much is left; if not, says that `what` is skipped."""
        left = self.left - (0 if last else self.reserve)
        if left >= seconds:
            return True
        self.skip(f"{what}: about {seconds:.0f} s, and {max(left, 0):.0f} s are left for it")
        return False

    def skip(self, why: str) -> None:
        self.skipped.append(why)
        console.say(f"skipped {why}")


@dataclass(frozen=True)
class Times:
    """Milliseconds of several runs."""

    median_ms: float
    best_ms: float
    runs: int

    @classmethod
    def of(cls, milliseconds: list[float]) -> "Times":
        return cls(statistics.median(milliseconds), min(milliseconds), len(milliseconds))


@dataclass(frozen=True)
class Row:
    """One measured thing; rates are of the median.

    Attributes
    ----------
    name, heads, tokens
        What was measured.
    setting
        How.
    expected_ms
        `kvhub.roofline`'s; None where it does not know the device, or says nothing of this.
    gbps, tflops
        What was reached, of the bytes and operations that the roofline counts.
    """

    name: str
    heads: str | None
    tokens: int
    setting: str
    median_ms: float
    best_ms: float
    runs: int
    expected_ms: float | None = None
    gbps: float | None = None
    expected_gbps: float | None = None
    tflops: float | None = None
    expected_tflops: float | None = None

    @property
    def found_over_expected(self) -> float | None:
        return self.median_ms / self.expected_ms if self.expected_ms else None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "found_over_expected": self.found_over_expected}


def row(
    name: str,
    heads: str | None,
    tokens: int,
    setting: str,
    times: Times,
    *,
    expected: float | None = None,
    size: int | None = None,
    flops: int | None = None,
) -> Row:
    """A row of times; `expected` seconds, `size` bytes and `flops` operations where they apply."""
    found = 1e-3 * times.median_ms
    rates = {}
    for key, amount, unit in (("gbps", size, 1e9), ("tflops", flops, 1e12)):
        rates[key] = amount / found / unit if amount else None
        rates[f"expected_{key}"] = amount / expected / unit if amount and expected else None
    expected_ms = None if expected is None else 1e3 * expected
    return Row(name, heads, tokens, setting, **asdict(times), expected_ms=expected_ms, **rates)


class Timer:
    """Times functions on a device, with its L2 flushed before every run.

    Parameters
    ----------
    device
        With CUDA, events on the current stream measure; else a wall clock.
    seconds
        To spend on the runs of one function, warm; 0 for a single cold one, enough for a toy.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.cuda = device.type == "cuda"
        self.seconds = seconds
        if self.cuda:
            self.buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
            self.buffer.zero_()
            self.fill_ms = self._once(self.buffer.zero_)

    def stamp(self) -> Any:
        """A moment, for `elapsed`: on the device, once it has done what came before."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed(self, begin: Any, end: Any) -> float:
        """Milliseconds between two stamps; the device must be done."""
        return begin.elapsed_time(end) if self.cuda else 1e3 * (end - begin)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def measure(
        self,
        run: Callable[[], object],
        *,
        hold: bool = False,
        wall: bool = False,
        kernels: "KernelTimes | None" = None,
    ) -> Times:
        """Time a function.

        Parameters
        ----------
        run
            What to time.
        hold
            Keep the device busy before each run for as long as launching takes, so that what is
            measured is the device's time and not Python's. Otherwise it idles as a caller's would.
        wall
            From the call until the device is done, by the host's clock.
        kernels
            Told of the begin and the end of each timed run.
        """
        runs, host_ms = 1, 0.0
        # The first run compiles and allocates, the second tells how long one takes.
        for _ in range(2 if self.seconds else 0):
            self.wait()
            begin = time.perf_counter()
            run()
            host_ms = 1e3 * (time.perf_counter() - begin)
            self.wait()
            once = time.perf_counter() - begin
            runs = min(max(int(self.seconds / once), MIN_RUNS), MAX_RUNS)
        found = []
        for _ in range(runs):
            self._flush(HOLD * host_ms if hold else 0)
            if not hold:
                self.wait()
            if kernels:
                kernels.begin()
            start = time.perf_counter()
            begin = self.stamp()
            run()
            end = self.stamp()
            self.wait()
            seconds = time.perf_counter() - start
            found.append(1e3 * seconds if wall else self.elapsed(begin, end))
            if kernels:
                kernels.end()
        return Times.of(found)

    def _flush(self, hold_ms: float) -> None:
        if self.cuda:
            for _ in range(1 + int(hold_ms / self.fill_ms)):
                self.buffer.zero_()

    def _once(self, run: Callable[[], object]) -> float:
        self.wait()
        begin = self.stamp()
        run()
        end = self.stamp()
        self.wait()
        return self.elapsed(begin, end)


class KernelTimes:
    """Milliseconds that each kernel took, summed over the launches of each run."""

    def __init__(self, timer: Timer) -> None:
        self.timer = timer
        self.names = ("gather", "multiply")
        self.spans: dict[str, list[tuple[Any, Any]]] = {name: [] for name in self.names}
        self.runs: dict[str, list[float]] = {name: [] for name in self.names}

    def begin(self) -> None:
        """Forget the launches that were not timed."""
        for spans in self.spans.values():
            spans.clear()

    def end(self) -> None:
        """Sum a run's launches; the device must be done."""
        for name, spans in self.spans.items():
            if spans:
                self.runs[name].append(sum(self.timer.elapsed(*span) for span in spans))

    def times(self, name: str) -> Times | None:
        """None if no launch was seen."""
        return Times.of(self.runs[name]) if self.runs[name] else None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Meanwhile the kernels' launches are timed, where they are and in their usual order."""
        from kvhub.exporters import triton_kernels

        kernels = {name: getattr(triton_kernels, name) for name in self.names}
        try:
            for name, kernel in kernels.items():
                setattr(triton_kernels, name, _Watched(kernel, self.timer, self.spans[name]))
            yield
        finally:
            for name, kernel in kernels.items():
                setattr(triton_kernels, name, kernel)


class _Watched:
    def __init__(self, kernel: Any, timer: Timer, spans: list[tuple[Any, Any]]) -> None:
        self.kernel, self.timer, self.spans = kernel, timer, spans

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        launch = self.kernel[grid]

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self.timer.stamp()
            result = launch(*args, **kwargs)
            self.spans.append((begin, self.timer.stamp()))
            return result

        return timed
