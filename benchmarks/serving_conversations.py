"""Conversations that switch between two engines at random, and what was found of a run."""

import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from serving_faults import EVENT_SECONDS, Faults, Files, Mooncake
from serving_reference import Checker, ShadowHost

TENANTS = (None, "acme", "umbrella")
LONGEST = 280  # tokens of a conversation
SYSTEM_PROMPTS, SYSTEM_TOKENS = 4, 48
SEED = 1 << 20
SAMPLE_SECONDS = 0.5


@dataclass(eq=False)
class Conversation:
    """One that goes on until it is long enough, and then is another one."""

    tokens: list[int]
    tenant: str | None
    turns: int
    asked: Any = None
    cancel_in: int | None = None


@dataclass
class Soak:
    """What a run found."""

    engines: dict[str, Counter[str]] = field(default_factory=dict)
    states: dict[str, Counter[str]] = field(default_factory=dict)
    counters: dict[str, dict[str, int]] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=lambda: {"tie": 0.0, "states": 0.0})
    faults: Counter[str] = field(default_factory=Counter)
    dead: list[str] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)
    requests: int = 0
    cancelled: int = 0
    seconds: float = 0.0
    over: int = 0
    leaks: Counter[str] = field(default_factory=Counter)
    rss: list[float] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)
    connections: int = 0  # that clients of the store may keep and open when they like

    def total(self, name: str) -> int:
        """Of both engines."""
        return sum(counts[name] for counts in self.engines.values())

    @property
    def growth(self) -> tuple[float, float]:
        """MiB by which memory grew in the first half after the start, and in the second."""
        count = len(self.rss)
        if count < 8:
            return 0.0, 0.0
        ends = [self.rss[at * count // 8 : (at + 1) * count // 8] for at in (1, 4, 7)]
        start, middle, end = (median(part) for part in ends)
        return middle - start, end - middle

    @property
    def more_handles(self) -> int:
        """By how many the fewest of the last quarter are more than those of the second."""
        quarter = len(self.handles) // 4
        if not quarter:
            return 0
        return max(0, min(self.handles[-quarter:]) - min(self.handles[quarter : 2 * quarter]))


class Driver:
    """The conversations, and both engines.

    Parameters
    ----------
    hosts, checkers, salts
        By engine; salts by tenant.
    store, faults
        What goes wrong.
    conversations, seed
        How many at a time, and what they are made from.
    """

    def __init__(
        self,
        hosts: dict[str, ShadowHost],
        checkers: dict[str, Checker],
        salts: dict[str, dict[str | None, str]],
        store: Files | Mooncake,
        faults: Faults,
        conversations: int,
        seed: int,
    ) -> None:
        self.hosts, self.checkers, self.salts = hosts, checkers, salts
        self.store, self.faults = store, faults
        self.choose = random.Random(seed + SEED)
        self.vocabulary = checkers["a"].model.config.vocab_size
        self.prompts = [self._random(SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
        self.running: list[Conversation] = []
        for _ in range(conversations):
            self.running.append(self._begin())
        self.soak = Soak()
        self._strike_at = self._sample_at = 0.0

    def run(self, seconds: float) -> None:
        """Serve for a while, then finish what was begun without faults."""
        start = time.monotonic()
        self._strike_at = start + EVENT_SECONDS
        while time.monotonic() - start < seconds and not self.soak.dead:
            for conversation in self.running:
                self._continue(conversation)
            self._step()
            self._watch()
        self.faults.active = False
        self.soak.seconds = time.monotonic() - start
        for _ in range(20_000):
            busy = [host for host in self.hosts.values() if host.waiting or host.active]
            if self.soak.dead or not busy:
                break
            self._step()

    def _step(self) -> None:
        for name, host in self.hosts.items():
            try:
                host.step()
            except Exception as error:
                self.soak.dead.append(f"engine {name}: {error!r} from {error.__cause__!r}")
                return
        self.store.tick(self.faults)
        for checker in self.checkers.values():
            checker.check()

    def _watch(self) -> None:
        now = time.monotonic()
        if now > self._strike_at:
            self._strike_at = now + self.choose.expovariate(1 / EVENT_SECONDS)
            self.store.strike(self.faults)
        if now > self._sample_at:
            self._sample_at = now + SAMPLE_SECONDS
            self.soak.over = max(self.soak.over, self.store.over())
            self.soak.rss.append(resident())
            self.soak.handles.append(len(os.listdir("/proc/self/fd")))

    def _continue(self, conversation: Conversation) -> None:
        asked = conversation.asked
        if asked is not None and not asked.done:
            if conversation.cancel_in is not None:
                conversation.cancel_in -= 1
                if conversation.cancel_in < 0:
                    self._engine_of(asked).cancel(asked)
                    conversation.cancel_in = None
            return
        if asked is not None:
            conversation.asked = None
            self.soak.requests += 1
            if asked.finish_reason == "length":
                conversation.tokens = list(asked.all_tokens)
                conversation.turns -= 1
            self.soak.cancelled += asked.finish_reason == "cancelled"
        if conversation.turns < 1 or len(conversation.tokens) > LONGEST:
            fresh = self._begin()
            conversation.tokens, conversation.tenant = fresh.tokens, fresh.tenant
            conversation.turns = fresh.turns
        self._ask(conversation)

    def _ask(self, conversation: Conversation) -> None:
        choose = self.choose
        name = choose.choice(sorted(self.hosts))
        tenant, kind = conversation.tenant, choose.random()
        salt: str | None = self.salts[name][tenant]
        if kind < 0.15:
            salt = tenant  # as somebody who does not know of kvhub
        elif kind < 0.17:
            salt = "kvhub:0123456789abcdef"  # of another mapper
        prompt = conversation.tokens + self._random(choose.randint(3, 40))
        options = {"lora_task_id": 7} if choose.random() < 0.02 else {}
        count = choose.randint(2, 14)
        request = self.hosts[name].submit(prompt, count, salt, **options)
        request.engine = name
        conversation.asked = request
        conversation.cancel_in = choose.randrange(8) if choose.random() < 0.05 else None
        if choose.random() < 0.1:  # by somebody else too, at the same time
            self.soak.requests += 1
            self.hosts[name].submit(prompt, choose.randint(2, 14), salt, **options)

    def _engine_of(self, request: Any) -> ShadowHost:
        return self.hosts[request.engine]

    def _begin(self) -> Conversation:
        choose = self.choose
        if self.running and choose.random() < 0.25:  # a fork
            other = choose.choice(self.running)
            if len(other.tokens) < LONGEST // 2:
                return Conversation(list(other.tokens), other.tenant, choose.randint(2, 6))
        tokens = list(choose.choice(self.prompts)) if choose.random() < 0.7 else []
        return Conversation(tokens, choose.choice(TENANTS), choose.randint(3, 9))

    def _random(self, count: int) -> list[int]:
        return [self.choose.randrange(self.vocabulary) for _ in range(count)]


def resident() -> float:
    """MiB of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
