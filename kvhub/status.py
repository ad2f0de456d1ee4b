"""What is said about a repository's versions after they were made, in status.json on main.

There it can change while no version does: which versions are yanked and why, and what to use
instead of the whole repository.
"""

import json
import re
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from kvhub.errors import NotFoundError, UsageError
from kvhub.hub import Status, list_versions, parse_status
from kvhub.release import CARD, MANIFEST, SIGNATURE, read_manifest
from kvhub.remote import Content, Remote, commit, open_remote
from kvhub.versions import parse_reference, parse_version

__all__ = ["deprecate", "unyank", "yank"]

STATUS = "status.json"
FRONT_MATTER = re.compile(r"\A\s*^---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
NEW_VERSION = re.compile(r"^new_version:.*\n?", re.MULTILINE)


def yank(repo_id: str, version: str, reason: str) -> str:
    """Say that a version should not be used; it stays where it is.

    Parameters
    ----------
    repo_id
        The repository.
    version
        Such as `1.2.0`.
    reason
        Shown to everybody who loads that version.

    Returns
    -------
    str
        The commit that says so.

    Raises
    ------
    NotFoundError
        There is no such version.
    ConflictError
        Somebody else changed the repository at the same time.
    """
    if not reason.strip():
        raise UsageError("A version is yanked for a reason; found none.", "Give one: --reason TEXT")
    asked = parse_version(version)
    remote, status = _read(repo_id)
    published = [str(found.version) for found in list_versions(repo_id)]
    if str(asked) not in published:
        raise NotFoundError(
            f"{repo_id} has no version {asked}; it has: {', '.join(published) or 'none'}.",
            f"See `kvhub versions {repo_id}`.",
        )
    yanked = {**status.yanked, str(asked): reason}
    return _write(remote, replace(status, yanked=yanked), f"Yank {asked}")


def unyank(repo_id: str, version: str) -> str:
    """Take a `yank` back; returns the commit."""
    asked = parse_version(version)
    remote, status = _read(repo_id)
    if str(asked) not in status.yanked:
        raise NotFoundError(
            f"Version {asked} of {repo_id} is not yanked; yanked are: "
            f"{', '.join(sorted(status.yanked)) or 'none'}.",
            f"See `kvhub versions {repo_id}`.",
        )
    yanked = {name: text for name, text in status.yanked.items() if name != str(asked)}
    return _write(remote, replace(status, yanked=yanked), f"Take back the yank of {asked}")


def deprecate(repo_id: str, *, reason: str | None, new_version: str | None = None) -> str:
    """Say that a repository should not be used any more, and what to use instead of it.

    The Hub shows the latter on the repository's page, from the card. No version changes.

    Parameters
    ----------
    repo_id
        The repository.
    reason
        Why; None takes a deprecation back.
    new_version
        The repository to use instead.

    Returns
    -------
    str
        The commit that says so.
    """
    if new_version is not None and parse_reference(new_version).revision is not None:
        raise UsageError(
            f"Expected a repository to use instead, found {new_version!r} with a revision.",
            "Give it as org/name.",
        )
    remote, status = _read(repo_id)
    status = replace(status, deprecated=reason, new_version=new_version)
    return _write(remote, status, "Deprecate" if reason else "Take back the deprecation")


def _read(repo_id: str) -> tuple[Remote, Status]:
    if parse_reference(repo_id).revision is not None:
        raise UsageError(
            f"Expected a repository, found {repo_id!r} with a revision.", "Give it as org/name."
        )
    remote = open_remote(repo_id)
    path = remote.fetch(STATUS)
    if path is None:
        return remote, Status({}, None, None)
    return remote, parse_status(repo_id, path.read_bytes())


def _write(remote: Remote, status: Status, title: str) -> str:
    """Commit a status, and the successor that it names to the card, from which the Hub shows it."""
    with tempfile.TemporaryDirectory(prefix="kvhub-status-") as name:
        folder = Path(name)
        text = json.dumps({"schema_version": 1, **asdict(status)}, indent=2, ensure_ascii=False)
        (folder / STATUS).write_text(text + "\n", encoding="utf-8")
        wanted: dict[str, Content | None] = {STATUS: Content.of(folder / STATUS)}
        card = remote.fetch(CARD)
        if card is not None:
            named = _name_successor(card.read_bytes().decode(), status.new_version)
            (folder / CARD).write_bytes(named.encode())
            wanted[CARD] = content = Content.of(folder / CARD)
            manifest = read_manifest(remote)
            if manifest is not None and CARD in remote.differing(wanted):
                # Main stays what its manifest says; a signature would not fit it any more.
                replace(manifest, files={**manifest.files, CARD: content.entry}).write(folder)
                wanted |= {MANIFEST: Content.of(folder / MANIFEST), SIGNATURE: None}
        return commit(remote, wanted, title)[0]


def _name_successor(card: str, new_version: str | None) -> str:
    """Set one key of a card's metadata, and leave every other character as it is."""
    line = f"new_version: {new_version}\n" if new_version else ""
    match = FRONT_MATTER.match(card)
    if match is None:
        return f"---\n{line}---\n\n{card}" if line else card
    return card[: match.start(1)] + NEW_VERSION.sub("", match[1]) + line + card[match.end(1) :]
