"""Versions of mappers: references to them, ranges of them, and which one a change demands.

A reference is `org/repo[@revision]`. The revision is a version (`1.2.0`), a range of versions
(`^1.2`, `~1.2`, `>=1.1,<2`, `1.x`), a commit of 40 digits or a branch; without one the newest
version is meant. A version is the tag `v1.2.0` of the repository, which never moves.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from semantic_version import NpmSpec, Version

from kvhub.errors import UsageError

if TYPE_CHECKING:
    from kvhub.mapper_config import MapperConfig
    from kvhub.package import Manifest

__all__ = [
    "Bump",
    "Reference",
    "Version",
    "classify",
    "is_reference",
    "newest_matching",
    "next_version",
    "parse_reference",
    "parse_tag",
    "parse_version",
    "propose",
    "tag_of",
]

Bump: TypeAlias = Literal["major", "minor", "patch", "none"]
Kind: TypeAlias = Literal["newest", "version", "range", "commit", "branch"]

COMMIT = re.compile(r"[0-9a-f]{40}")
# The Hub's own rules: no "--" or "..", and no end that git gives a meaning.
REPO_NAME = re.compile(
    r"(?!.*(?:--|\.\.|\.git$))[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?", re.ASCII
)
# Anything that git can name and every range; what it cannot hold is a way out of the cache.
REVISION = re.compile(r"(?!.*(?:\.\.|//))[\w^~<>=*][\w.^~<>=*|,/+ -]*", re.ASCII)
RANGE_SIGNS = re.compile(r"[\^~<>=*|, ]")
# `1`, `v1`, `1.2` and `1.x` are ranges without a sign.
PARTIAL = re.compile(r"v?(0|[1-9]\d*)(\.(0|[1-9]\d*|[xX])){0,2}")


@dataclass(frozen=True)
class Reference:
    """A repository of the Hub and, unless its newest version is meant, a revision of it."""

    repo_id: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repo_id}@{self.revision}" if self.revision else self.repo_id


def is_reference(text: str) -> bool:
    """Whether a text has the form of `org/repo[@revision]`, unlike a local name or path."""
    owner, slash, name = text.partition("@")[0].partition("/")
    return bool(owner and slash and name) and "/" not in name and owner[0] not in ".~"


def parse_reference(text: str) -> Reference:
    """Read `org/repo[@revision]`.

    Raises
    ------
    UsageError
        It is not one.
    """
    repo_id, at, revision = text.partition("@")
    parts = repo_id.split("/")
    if len(parts) != 2 or not all(REPO_NAME.fullmatch(part) for part in parts):
        raise UsageError(
            f"{repo_id!r} cannot be a repository of the Hub: expected org/name, each of letters, "
            "digits, '.', '_' and '-'.",
            "For example org/qwen3-8b-to-32b, or org/qwen3-8b-to-32b@1.0.0 for one version.",
        )
    if at and not REVISION.fullmatch(revision):
        raise UsageError(
            f"{text!r}: {revision!r} cannot be a revision: expected a version, a range of "
            "versions, a commit of 40 digits or a branch.",
            f"For example {repo_id}@1.0.0, {repo_id}@^1.2 or {repo_id}@main.",
        )
    reference = Reference(repo_id, revision if at else None)
    classify(reference.revision)
    return reference


def parse_tag(tag: str) -> Version | None:
    """Return the version that a tag names, None for any other tag."""
    try:
        version = parse_version(tag)
    except UsageError:
        return None
    return version if tag == tag_of(version) else None


def tag_of(version: Version) -> str:
    """Return the tag of a version: `v1.2.3`."""
    return f"v{version}"


def parse_version(text: str) -> Version:
    """Read `1.2.3`, `v1.2.3` or `1.2.3-rc.1`.

    Raises
    ------
    UsageError
        It is not a version. Build metadata (`1.2.3+abc`) is refused, since it has no order.
    """
    try:
        version = Version(text.removeprefix("v"))
    except ValueError:
        version = None
    if version is None or version.build:
        raise UsageError(
            f"{text!r} is not a version: expected MAJOR.MINOR.PATCH, for a prerelease with "
            "-NAME behind it.",
            "For example 1.2.0 or 1.2.0-rc.1.",
        )
    return version


def classify(revision: str | None) -> Kind:
    """Tell what kind of revision this is; a branch is whatever is nothing else.

    Raises
    ------
    UsageError
        It has the signs of a range and is none.
    """
    if revision is None:
        return "newest"
    if COMMIT.fullmatch(revision):
        return "commit"
    try:
        parse_version(revision)
    except UsageError:
        pass
    else:
        return "version"
    if RANGE_SIGNS.search(revision) or PARTIAL.fullmatch(revision):
        _parse_range(revision)
        return "range"
    return "branch"


def newest_matching(versions: Iterable[Version], requested: str | None) -> Version | None:
    """Return the newest of these versions in a range, or of all; None where there is none.

    A prerelease only counts where the range or the version asked for names one.
    """
    if requested is None:
        found = [version for version in versions if not version.prerelease]
    elif classify(requested) == "version":
        found = [version for version in versions if version == parse_version(requested)]
    else:
        spec = _parse_range(requested)
        found = [version for version in versions if spec.match(version)]
    return max(found, default=None)


def _parse_range(text: str) -> NpmSpec:
    # npm separates by spaces only, and has none behind a sign.
    spaced = re.sub(r"[,\s]+", " ", text).strip()
    try:
        return NpmSpec(re.sub(r"([\^~<>=]) ", r"\1", spaced))
    except ValueError as error:
        raise UsageError(
            f"{text!r} is not a range of versions.",
            "For example ^1.2, ~1.2, 1.x or '>=1.1,<2' (in quotes, because of the shell).",
        ) from error


def propose(
    previous: "MapperConfig",
    previous_manifest: "Manifest",
    config: "MapperConfig",
    manifest: "Manifest",
) -> Bump:
    """Tell which part of the version has to rise from one package to another.

    Returns
    -------
    str
        `major` where a base model or the shapes of the tensors differ; `minor` where the tensors
        or the source layers they read differ; `patch` where anything else does; `none` where at
        most the cards differ.
    """
    if previous_manifest.content_digest == manifest.content_digest:
        return "none"
    # A spec holds the model's id, commit, geometry, RoPE and tokenizer.
    for key in ("source", "target", "heads", "top_k"):
        if getattr(previous, key) != getattr(config, key):
            return "major"
    if previous.selection != config.selection:
        return "minor"
    if previous_manifest.tensors_digest != manifest.tensors_digest:
        return "minor"
    return "patch"


def next_version(previous: Version | None, bump: Bump) -> Version:
    """Return the lowest version that follows; the first one is 1.0.0."""
    if previous is None:
        return Version("1.0.0")
    if bump == "none":
        return previous
    raised: Version = getattr(previous, f"next_{bump}")()
    return raised
