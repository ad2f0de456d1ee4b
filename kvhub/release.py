"""The version that a package becomes in a repository, and the files of that version.

The version follows from what changed since the newest one; the card is rendered for it and keeps
what people wrote into the one on main.
"""

import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvhub.errors import (
    AuthError,
    ConflictError,
    NotFoundError,
    UsageError,
    VerificationError,
)
from kvhub.hub import Published, client, list_versions, translated
from kvhub.remote import Content, Remote, Wanted, open_remote
from kvhub.versions import (
    Version,
    next_version,
    parse_reference,
    parse_version,
    propose,
    tag_of,
)

if TYPE_CHECKING:
    from kvhub.cards.licenses import License
    from kvhub.mapper_config import MapperConfig
    from kvhub.package import Manifest

__all__ = ["Decision", "Request", "decide", "read_manifest", "read_request", "staged"]

CARD, MANIFEST, SIGNATURE = "README.md", "manifest.json", "kvhub.sig"
# What raises each part of a version.
CHANGES = {
    "major": "a base model or the shapes of the tensors changed",
    "minor": "the tensors, or the source layers they read, changed",
    "patch": "other files changed",
}


@dataclass(frozen=True)
class Package:
    """A package whose content was checked; one on the Hub without its tensors."""

    directory: Path
    config: "MapperConfig"
    manifest: "Manifest"


@dataclass(frozen=True)
class Request:
    """What is to be published where, as far as it can be known without the Hub."""

    package: Package
    repo_id: str
    version: Version | None
    asked_license: str | None
    private_key: Path | None

    @cached_property
    def license(self) -> "License | str | None":
        """What was asked for, or what both models demand together; None where that is unknown."""
        from kvhub.cards.licenses import License, stricter_license
        from kvhub.cards.metadata import hub_id

        if self.asked_license is not None:
            return self.asked_license
        licenses = []
        for spec in (self.package.config.source, self.package.config.target):
            model_id: str | None = hub_id(spec.to_dict())
            if model_id is None:
                return None
            try:
                with translated(f"reading the licence of {model_id}"):
                    info = client().model_info(model_id, revision=spec.revision)
            except (AuthError, NotFoundError):
                return None
            card = info.card_data.to_dict() if info.card_data else {}
            licenses.append(License.of_model(model_id, card))
        found: License | None = stricter_license(*licenses)
        return found

    def card(self, version: Version, previous: Path | None) -> bytes:
        """Render the card of the package as that version."""
        from kvhub.cards import render_card

        directory, names = self.package.directory, self.package.manifest.files
        report = None
        if "report.json" in names:
            report = json.loads((directory / "report.json").read_text(encoding="utf-8"))
        text: str = render_card(
            self.repo_id.split("/")[1],
            json.loads((directory / "config.json").read_text(encoding="utf-8")),
            report,
            sorted(name.removeprefix("plots/") for name in names if name.startswith("plots/")),
            repo_id=self.repo_id,
            version=str(version),
            license=self.license,
            previous=previous and previous.read_text(encoding="utf-8"),
        )
        return text.encode()

    def manifest(self, card: bytes) -> "Manifest":
        """List the package's files with another card."""
        from kvhub.package import Manifest

        entry = (hashlib.sha256(card).hexdigest(), len(card))
        return Manifest({**self.package.manifest.files, CARD: entry})


@dataclass(frozen=True)
class Decision:
    """Which version a package becomes.

    `there` is the version that is on the Hub already with this content, `newest` the newest one
    there, and `known` are the files of that one.
    """

    version: Version
    bump: str
    newest: Published | None = None
    there: Published | None = None
    known: frozenset[str] = frozenset()


def read_request(
    directory: Path,
    repo_id: str,
    version: str | None,
    license: str | None,
    private_key: Path | None,
) -> Request:
    """Check all that can be checked without the Hub."""
    from kvhub.package import Manifest, load, read_config

    if parse_reference(repo_id).revision is not None:
        raise UsageError(
            f"{repo_id!r} names a revision, and a push makes a new one.",
            "Give the repository as org/name, and the version with --version.",
        )
    asked = None if version is None else parse_version(version)
    # Reads every tensor, so that nothing is published that nobody could load.
    load(directory)
    package = Package(directory, read_config(directory)[0], Manifest.read(directory))
    return Request(package, repo_id, asked, license, private_key)


def decide(request: Request, remote: Remote | None) -> Decision:
    """Work out the version from what changed since the newest one, and from what was asked for."""
    published = [] if remote is None else list_versions(request.repo_id)
    if remote is None or not published:
        return Decision(request.version or next_version(None, "none"), "first")
    newest = published[0]
    asked = next((found for found in published if found.version == request.version), None)
    there = asked or newest
    package, card = _published(remote, there)
    # With the card that it has there: what people changed in it on main since is no new content.
    manifest = request.manifest(request.card(there.version, card))
    known = frozenset(package.manifest.files)
    if manifest.digest == package.manifest.digest and (asked or request.version is None):
        return Decision(there.version, "none", newest, there, known)
    if asked is not None:
        raise ConflictError(
            f"{tag_of(asked.version)} of {request.repo_id} is there and never changes: its digest "
            f"is {package.manifest.digest}, that of {request.package.directory} as the same "
            f"version {manifest.digest}.",
            "Push without --version to take the next one.",
        )
    bump = propose(package.config, package.manifest, request.package.config, manifest)
    if bump == "none":
        bump = "patch"
    demanded = next_version(newest.version, bump)
    version = request.version or demanded
    # A prerelease of the version that is demanded will do.
    if version <= newest.version or version.truncate() < demanded:
        raise UsageError(
            f"Version {version} of {request.repo_id} is too low: expected {demanded} or higher, "
            f"since the newest is {newest.version} and {CHANGES[bump]}.",
            "Push without --version to take the lowest that is allowed.",
        )
    return Decision(version, bump, newest, None, known)


def _published(remote: Remote, version: Published) -> tuple[Package, Path | None]:
    """Fetch what a version says about itself, and its card."""
    from kvhub.package import Manifest, read_config

    if remote.commit != version.commit:
        remote = open_remote(remote.repo_id, version.commit)
    manifest, config = remote.fetch(MANIFEST), remote.fetch("config.json")
    if manifest is None or config is None:
        raise ConflictError(
            f"{tag_of(version.version)} of {remote.repo_id} is not a mapper: expected {MANIFEST} "
            "and config.json there.",
            "Push to another repository.",
        )
    folder = manifest.parent
    package = Package(folder, read_config(folder)[0], Manifest.read(folder))
    return package, remote.fetch(CARD)


@contextmanager
def staged(request: Request, remote: Remote | None, decision: Decision) -> Iterator[Wanted]:
    """Yield what main should hold for a version: its files, and none of an older one."""
    with tempfile.TemporaryDirectory(prefix="kvhub-push-") as name:
        folder = Path(name)
        # What people wrote into the card since the newest version is kept, and so published.
        card = request.card(decision.version, remote.fetch(CARD) if remote else None)
        manifest = request.manifest(card)
        (folder / CARD).write_bytes(card)
        manifest.write(folder)
        directory = request.package.directory.resolve()
        contents = {
            file: Content((folder if file == CARD else directory) / file, sha256, size)
            for file, (sha256, size) in manifest.files.items()
        }
        contents[MANIFEST] = Content.of(folder / MANIFEST)
        if request.private_key is not None:
            contents[SIGNATURE] = _sign(folder, contents, request.private_key)
        stale = {} if remote is None else _stale(remote, decision.known, contents)
        yield {**stale, **contents}


def _sign(folder: Path, contents: dict[str, Content], private_key: Path) -> Content:
    from kvhub.signing import sign

    for name, content in contents.items():
        path = folder / name
        if content.path != path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(content.path)
    return Content.of(sign(folder, private_key))


def _stale(remote: Remote, known: frozenset[str], contents: dict[str, Content]) -> dict[str, None]:
    """Find the files of earlier versions that are to go.

    Raises
    ------
    ConflictError
        A file that no version brought would be overwritten.
    """
    if (manifest := read_manifest(remote)) is not None:
        known |= manifest.files.keys()
    foreign = (remote.files.keys() & contents.keys()) - known - {CARD}
    if known:
        foreign -= {MANIFEST, SIGNATURE}
    if foreign:
        raise ConflictError(
            f"{remote.repo_id} holds {sorted(foreign)}, which no mapper brought there and this "
            "one would overwrite.",
            "Push to another repository, or delete them there first.",
        )
    stale = (remote.files.keys() & known) - contents.keys()
    # A signature is of all files, the manifest included.
    if remote.differing({MANIFEST: contents[MANIFEST]}) and SIGNATURE not in contents:
        stale |= remote.files.keys() & {SIGNATURE}
    return dict.fromkeys(sorted(stale))


def read_manifest(remote: Remote) -> "Manifest | None":
    """Read the manifest; None where there is none, or none of a mapper."""
    from kvhub.package import Manifest

    manifest = remote.fetch(MANIFEST)
    if manifest is None:
        return None
    try:
        return Manifest.read(manifest.parent)
    except VerificationError:
        return None
