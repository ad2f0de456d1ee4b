"""Lock files: which commit of which mappers a project uses, with the digest of every byte.

    {
      "schema_version": 1,
      "mappers": {
        "org/qwen3-8b-to-32b": {
          "requested": "^1.2",
          "version": "1.2.0",
          "commit": "…",
          "digest": "…",
          "source": {"id": "Qwen/Qwen3-8B", "revision": "…"},
          "target": {"id": "Qwen/Qwen3-32B", "revision": "…"}
        }
      }
    }

It belongs in version control. Entries are sorted and each has lines of its own, so that two
people who change different ones have nothing to merge by hand. `requested` is what was asked for
and null for the newest version; all that follows is what that was.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvhub.atomic import write_text
from kvhub.errors import (
    ConflictError,
    NetworkError,
    NotFoundError,
    UsageError,
    VerificationError,
)
from kvhub.hub import Resolved, download, list_versions, resolve
from kvhub.hub_cache import cached_refs, remember
from kvhub.versions import Reference, parse_reference, parse_version, tag_of

__all__ = ["Locked", "Synced", "load_locked", "lock", "sync"]

SCHEMA_VERSION = 1
COMMIT, DIGEST = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Locked:
    """An entry of a lock file.

    Attributes
    ----------
    requested
        The revision that was asked for; None for the newest version.
    version
        What it was resolved to; None where the commit has no version.
    commit
        The commit of that.
    digest
        `kvhub.package.Manifest.digest` of the package at that commit.
    source, target
        `id` and `revision` of the two models, for people: the package says it too.
    """

    requested: str | None
    version: str | None
    commit: str
    digest: str
    source: dict[str, str | None]
    target: dict[str, str | None]

    @property
    def name(self) -> str:
        return self.version or self.commit


@dataclass(frozen=True)
class Synced:
    """A locked mapper that is now in the cache at `path`, with its entry before and after."""

    repo_id: str
    path: Path
    previous: Locked
    locked: Locked

    @property
    def changed(self) -> bool:
        return self.previous != self.locked

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "path": str(self.path), "changed": self.changed}


def lock(references: Iterable[str], path: Path) -> dict[str, dict[str, Any]]:
    """Resolve mappers, download them, and write down what they were.

    Parameters
    ----------
    references
        `org/repo[@revision]`, one for each mapper; other entries of the file stay.
    path
        The lock file, which only changes once all of them are there.

    Returns
    -------
    dict
        The new entries, by repository.

    Raises
    ------
    UsageError
        What is no reference, a mapper twice, or a file that is no lock file.
    ConflictError
        A version was yanked.
    VerificationError
        A version that was locked has been moved, or a package is not what was locked.
    AuthError, NetworkError, NotFoundError
        The Hub refuses, cannot be reached, or has no such mapper or revision.
    """
    asked: dict[str, Reference] = {}
    for reference in map(parse_reference, references):
        if reference.repo_id in asked:
            raise UsageError(
                f"{asked[reference.repo_id]} and {reference} are the same mapper; a lock file has "
                "one revision of each.",
                "Name one of them.",
            )
        asked[reference.repo_id] = reference
    entries = _read(path) if path.is_file() else {}
    locked = {
        repo_id: _resolve(reference, entries.get(repo_id), path)[0]
        for repo_id, reference in asked.items()
    }
    _update(path, locked)
    return {repo_id: asdict(entry) for repo_id, entry in locked.items()}


def sync(path: Path, frozen: bool) -> list[Synced]:
    """Download every mapper of a lock file.

    Parameters
    ----------
    path
        The lock file.
    frozen
        Take the commits that are locked: nothing is resolved or written, and what is in the cache
        already needs no network. Otherwise what was requested is resolved again, and the file is
        brought up to date once all of it is there.

    Raises
    ------
    UsageError, NotFoundError
        There is no such file, or it is no lock file.
    VerificationError
        A package is not what was locked; or, unless frozen, a version has been moved.
    ConflictError
        Unless frozen: what was requested is a version that was yanked.
    AuthError, NetworkError
        The Hub refuses or cannot be reached.
    """
    entries = _require(path)
    if frozen:
        return [
            Synced(repo_id, _download(repo_id, entry, path), entry, entry)
            for repo_id, entry in entries.items()
        ]
    synced = []
    for repo_id, entry in entries.items():
        locked, package = _resolve(Reference(repo_id, entry.requested), entry, path)
        synced.append(Synced(repo_id, package, entry, locked))
    _update(path, {item.repo_id: item.locked for item in synced})
    return synced


def load_locked(repo_id: str, path: Path) -> Path:
    """Return the package of a locked mapper, downloaded if need be and verified.

    Raises
    ------
    UsageError
        `repo_id` names a revision, or the file is no lock file.
    NotFoundError
        There is no such file, or it does not have this mapper.
    VerificationError
        The package is not what was locked.
    AuthError, NetworkError
        It is not in the cache, and the Hub refuses or cannot be reached.
    """
    reference = parse_reference(repo_id)
    if reference.revision is not None:
        raise UsageError(
            f"{repo_id} names a revision, which is for {path} to say.",
            f"Leave it out: {reference.repo_id}",
        )
    entries = _require(path)
    if repo_id not in entries:
        raise NotFoundError(
            f"{path} does not have {repo_id}; it has: {', '.join(entries) or 'none'}.",
            f"Add it: kvhub lock {repo_id}",
        )
    return _download(repo_id, entries[repo_id], path)


def _resolve(reference: Reference, previous: Locked | None, lock_file: Path) -> tuple[Locked, Path]:
    """What a reference means on the Hub now, and the package that this is."""
    from kvhub.package import read_config

    repo_id = reference.repo_id
    if previous is not None and previous.version is not None:
        _require_unmoved(repo_id, previous, lock_file)
    resolved = resolve(reference)
    if resolved.status is None:
        raise NetworkError(
            f"Only the Hub knows what {reference} is now and whether it was yanked, and it could "
            "not be asked.",
            "Go online; what is locked already needs no network: kvhub sync --frozen",
        )
    reason = resolved.status.yanked.get(resolved.version or "")
    if reason is not None:
        raise ConflictError(
            f"Version {resolved.version} of {repo_id} was yanked: {reason}",
            f"Choose another one: kvhub versions {repo_id}",
        )
    package = download(resolved)
    digest = _digest(package)
    if previous is not None and previous.commit == resolved.commit:
        _require_same(repo_id, previous, digest, package, lock_file)
    config, _ = read_config(package)
    locked = Locked(
        requested=reference.revision,
        version=resolved.version,
        commit=resolved.commit,
        digest=digest,
        source={"id": config.source.model_id, "revision": config.source.revision},
        target={"id": config.target.model_id, "revision": config.target.revision},
    )
    return locked, package


def _download(repo_id: str, entry: Locked, lock_file: Path) -> Path:
    # As a commit and nothing else: what a tag or branch is by now does not matter here.
    package = download(Resolved(repo_id, entry.commit, None, entry.commit, None))
    _require_same(repo_id, entry, _digest(package), package, lock_file)
    if entry.version is not None:
        tag = tag_of(parse_version(entry.version))
        if tag not in cached_refs(repo_id):
            remember(repo_id, tag, entry.commit)
    return package


def _digest(package: Path) -> str:
    from kvhub.package import Manifest

    return Manifest.read(package).digest


def _require_unmoved(repo_id: str, entry: Locked, lock_file: Path) -> None:
    for published in list_versions(repo_id):
        if str(published.version) == entry.version and published.commit != entry.commit:
            raise VerificationError(
                f"Version {entry.version} of {repo_id} was moved: {lock_file} has commit "
                f"{entry.commit}, found {published.commit}. Versions never change.",
                "Ask its author why; until then `kvhub sync --frozen` takes the locked commit.",
            )


def _require_same(repo_id: str, entry: Locked, digest: str, package: Path, lock_file: Path) -> None:
    if digest != entry.digest:
        raise VerificationError(
            f"{repo_id} at {entry.name} is not what {lock_file} locked: expected digest "
            f"{entry.digest}, found {digest}.",
            f"If {lock_file} was edited, restore it; otherwise delete {package} and run: "
            "kvhub sync --frozen",
        )


def _require(path: Path) -> dict[str, Locked]:
    if not path.is_file():
        raise NotFoundError(f"There is no lock file {path}.", "Make one: kvhub lock ORG/REPO")
    return _read(path)


def _update(path: Path, locked: dict[str, Locked]) -> None:
    """Write entries beside those that the file has by now, unless it says all that already."""
    before = path.read_text(encoding="utf-8") if path.is_file() else None
    entries = {**(_read(path) if before is not None else {}), **locked}
    mappers = {repo_id: asdict(entries[repo_id]) for repo_id in sorted(entries)}
    content = {"schema_version": SCHEMA_VERSION, "mappers": mappers}
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    if text != before:
        write_text(path, text)


def _read(path: Path) -> dict[str, Locked]:
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not a lock file: {error}.", _repair(path)) from error
    if not isinstance(data, dict) or not isinstance(data.get("mappers"), dict):
        raise UsageError(f"{path} is not a lock file: it has no `mappers`.", _repair(path))
    if data.get("schema_version") != SCHEMA_VERSION:
        raise UsageError(
            f"{path} has schema version {data.get('schema_version')}; this kvhub reads "
            f"{SCHEMA_VERSION}.",
            "Upgrade kvhub: pip install -U kvhub",
        )
    for repo_id, entry in data["mappers"].items():
        if not _is_entry(repo_id, entry):
            raise UsageError(
                f"{path}: the entry of {repo_id!r} is incomplete or malformed.", _repair(path)
            )
    return {repo_id: Locked(**entry) for repo_id, entry in data["mappers"].items()}


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse what a merge that kept both sides leaves, of which JSON would take the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} stands there twice")
    return found


def _repair(path: Path) -> str:
    return (
        f"Restore {path} from version control (of a merge, keep one side of each entry), or "
        "delete it and lock again: kvhub lock ORG/REPO"
    )


def _is_entry(repo_id: str, entry: Any) -> bool:
    if not isinstance(entry, dict) or set(entry) != {field.name for field in fields(Locked)}:
        return False
    revision = f"@{entry['requested']}" if entry["requested"] is not None else ""
    try:
        reference = parse_reference(f"{repo_id}{revision}")
        version = None if entry["version"] is None else str(parse_version(str(entry["version"])))
    except UsageError:
        return False
    models = (entry["source"], entry["target"])
    return (
        (reference.repo_id, reference.revision) == (repo_id, entry["requested"])
        and entry["version"] == version
        and isinstance(entry["commit"], str)
        and isinstance(entry["digest"], str)
        and COMMIT.fullmatch(entry["commit"]) is not None
        and DIGEST.fullmatch(entry["digest"]) is not None
        and all(isinstance(model, dict) and set(model) == {"id", "revision"} for model in models)
        and all(isinstance(value, str | None) for model in models for value in model.values())
    )
