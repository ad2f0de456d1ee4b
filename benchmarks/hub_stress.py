"""Pushes and pulls through faults of the network and of the Hub; exit status 1 if a promise broke.

python benchmarks/hub_stress.py [--rounds N] [--seed N]

The Hub is that of the tests, on this machine, so no token and no network is needed. One round in
two pushes a package that differs from the newest version, the other pulls some version into a
cache that may hold parts of it; each with one kind of fault, or all kinds mixed, in about one
request of five. After every round these hold, or the run ends with an AssertionError:

- every version is the commit and the files that it was, and a package that loads;
- a push made one version, or none at all;
- what loads from the cache is bit-equal to what was pushed as that version;
- every error is a KVHubError that names what went wrong, and the same again without faults works.
"""

import argparse
import contextlib
import logging
import os
import random
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub.utils import disable_progress_bars

from kvhub import console
from kvhub.errors import KVHubError
from kvhub.hub import pull
from kvhub.hub_cache import cached
from kvhub.package import Manifest, load, save, verify
from kvhub.publishing import Pushed, push
from kvhub.versions import Reference

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from hub_server import HubServer, RandomFaults, connect_client, fast_retries
from mapping import random_mapper
from regression import spec

REPO = "org/mapper"
RATE = 0.2
KINDS = ("status", "drop", "reset_after", "drop_body", "truncate", "corrupt", "slow")
# TLS keeps single bits from changing on the way; on disks and in proxies files still are damaged.
FILES = "/resolve/|/lfs-storage/"
# What an error says of each kind of fault.
CAUSES = re.compile(
    r"rate limit|answered \d\d\d|connection|disconnected|closed|reset|peer|not the Hub's|"
    r"arrived damaged|truncated|edited or damaged|not JSON|not a manifest|Consistency check|"
    r"does not hold what|[Ss]omebody else|another size or sha256"
)


@dataclass
class Stress:
    """One repository, what it should hold, and how the rounds ended."""

    hub: HubServer
    folder: Path
    packages: list[Path]
    choose: random.Random
    # tag -> (commit, files by sha256, the package that was pushed as it)
    versions: dict[str, tuple[str, dict[str, str], Path]] = field(default_factory=dict)
    outcomes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    loaded: int = 0

    def round(self, number: int) -> None:
        """Push or pull once with faults, look at everything, and do it again without."""
        kind = (*KINDS, "mixed")[number // 2 % (len(KINDS) + 1)]
        faults = [RandomFaults(number, RATE, KINDS if kind == "mixed" else (kind,))]
        if kind in ("corrupt", "mixed"):
            faults[0].match = FILES
        if kind == "mixed":
            rest = [other for other in KINDS if other != "corrupt"]
            faults.append(RandomFaults(number + 1_000_000, RATE, rest))
        act = self.push if number % 2 == 0 else self.pull
        for fault in faults:
            self.hub.inject(fault)
        try:
            act()
            outcome = "done"
        except KVHubError as error:
            if not CAUSES.search(error.message) or not error.hint:
                raise AssertionError(f"This names no cause: {error!r}") from error
            outcome = type(error).__name__
        finally:
            self.hub.faults.clear()
        self.outcomes[act.__name__, kind, outcome] += 1
        hits = sum(fault.hits for fault in faults)
        self.outcomes[act.__name__, kind, "faults"] += hits
        if outcome != "done" and hits == 0:
            raise AssertionError(f"{outcome} without any fault.")
        self.require_unharmed()
        # Else the next push meets what this one left.
        if outcome != "done" and self.choose.random() < 0.5:
            act()
            self.require_unharmed()

    def push(self) -> None:
        """Push some package; whatever is told, at most one version is new, and it is whole."""
        package = self.choose.choice(self.packages)
        before = set(self.tags())
        pushed: Pushed | None = None
        try:
            pushed = push(package, REPO)
        finally:
            new = set(self.tags()) - before
            if len(new) > 1 or (pushed and new != ({pushed.tag} if pushed.changed else set())):
                raise AssertionError(f"A push made {new} and says {pushed}.")
            for tag in new:
                commit = self.tags()[tag]
                self.versions[tag] = (commit, self.files(commit), package)
                self.require_whole(tag)

    def pull(self) -> None:
        """Pull some version, and load what is in the cache whatever came of it."""
        if not self.versions:
            return
        tag = self.choose.choice(sorted(self.versions))
        try:
            resolved, path = pull(Reference(REPO, tag))
            if resolved.commit != self.versions[tag][0]:
                raise AssertionError(f"{tag} is {resolved.commit}.")
            self.require_equal(path, tag)
        finally:
            for found in cached():
                if found["version"] is not None:
                    self.require_equal(Path(found["path"]), f"v{found['version']}")
                self.loaded += 1

    def tags(self) -> dict[str, str]:
        """The commits of the repository's tags."""
        found: dict[str, str] = self.hub.snapshot(REPO).get("tags", {})
        return found

    def files(self, commit: str) -> dict[str, str]:
        """The sha256 of a commit's files."""
        files = self.hub.store.repo(REPO).files(commit)
        return {path: file["sha256"] for path, file in files.items()}

    def require_unharmed(self) -> None:
        """Check that every version is what it was."""
        tags = self.tags()
        if tags != {tag: commit for tag, (commit, _, _) in self.versions.items()}:
            raise AssertionError(f"The versions are {tags}.")
        for tag, (commit, files, _) in self.versions.items():
            if self.files(commit) != files:
                raise AssertionError(f"{tag} changed its content.")

    def require_whole(self, tag: str) -> None:
        """Check that a version on the Hub is a package, and the mapper that was pushed."""
        commit, files, package = self.versions[tag]
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            for path, sha256 in files.items():
                (Path(name) / path).parent.mkdir(parents=True, exist_ok=True)
                (Path(name) / path).write_bytes((self.hub.store.blobs / sha256).read_bytes())
            verify(Path(name))
            content = Manifest.read(Path(name)).content_digest
            if content != Manifest.read(package).content_digest:
                raise AssertionError(f"{tag} at {commit} is not {package}.")

    def require_equal(self, path: Path, tag: str) -> None:
        """Check that what loads is the mapper that was pushed."""
        expected = load(self.versions[tag][2]).tensors()
        for name, tensor in load(path).tensors().items():
            if not torch.equal(tensor, expected[name]):
                raise AssertionError(f"{name} of {tag} in {path} is another one.")


def run(rounds: int, seed: int, folder: Path, settings: Any) -> Stress:
    """Do the rounds in a new folder; `settings` is a monkeypatch, or what else has its setattr."""
    source, target = spec(2, name="org/source"), spec(3, name="org/target")
    packages = []
    for number in range(3):
        packages.append(folder / f"package-{number}")
        size = "1KB" if number else "5GB"
        save(random_mapper(source, target, seed=number), packages[-1], max_shard_size=size)
    with HubServer(folder / "hub") as hub:
        connect_client(settings, hub, folder / "cache")
        fast_retries(settings)
        stress = Stress(hub, folder, packages, random.Random(seed))
        for number in range(rounds):
            stress.round(number + seed * rounds)
    return stress


def main() -> None:
    """Run it and show how the rounds ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200, help="pushes and pulls; default: 200")
    parser.add_argument("--seed", type=int, default=0, help="of the faults; default: 0")
    arguments = parser.parse_args()
    os.environ["HF_TOKEN"] = "hf_stress"
    disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvhub-stress-")))
        plain = SimpleNamespace(setattr=setattr)
        stress = run(arguments.rounds, arguments.seed, folder, plain)
    show(stress)


def show(stress: Stress) -> None:
    """Print how many rounds of each kind ended how."""
    ends = sorted({end for _, _, end in stress.outcomes} - {"done", "faults"})
    console.table(
        f"{sum(count for (*_, end), count in stress.outcomes.items() if end != 'faults')} rounds",
        ("", "fault", "hits ", "done ", *(f"{end} " for end in ends)),
        [
            (
                act,
                kind,
                *(str(stress.outcomes[act, kind, end]) for end in ("faults", "done", *ends)),
            )
            for act in ("push", "pull")
            for kind in (*KINDS, "mixed")
        ],
    )
    console.say(
        f"{len(stress.versions)} versions, none of which changed; {stress.loaded} packages loaded "
        "from the cache, all of them bit-equal to what was pushed; every error named its cause."
    )


if __name__ == "__main__":
    main()
