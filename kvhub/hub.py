"""Finding mappers on the Hub and getting them: a reference becomes one commit, once.

A version is a tag that never moves. The Hub's cache keeps what was downloaded and which commit
each version was, so that what is there needs no network, and a version that moved is noticed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvhub.errors import NetworkError, NotFoundError
from kvhub.hub_cache import (
    cached,
    cached_refs,
    is_complete,
    newest_version,
    require_unmoved,
    snapshot,
)
from kvhub.hub_client import Resolved, Status, client, parse_status, read_status
from kvhub.hub_download import Progress, download, download_signed
from kvhub.hub_errors import translated
from kvhub.versions import (
    COMMIT,
    Reference,
    Version,
    classify,
    newest_matching,
    parse_tag,
    parse_version,
    tag_of,
)

if TYPE_CHECKING:
    from huggingface_hub import GitRefs

__all__ = [
    "Published",
    "Resolved",
    "Status",
    "cached",
    "client",
    "download",
    "download_signed",
    "list_versions",
    "parse_status",
    "pull",
    "read_status",
    "resolve",
    "search",
    "translated",
]


@dataclass(frozen=True)
class Published:
    """A version on the Hub; `yanked` is the reason why nobody should use it, None if they may."""

    version: Version
    commit: str
    yanked: str | None


def list_versions(repo_id: str) -> list[Published]:
    """List the versions of a repository, newest first, the yanked ones too."""
    return _published(_read_refs(repo_id), read_status(repo_id))


def resolve(reference: Reference) -> Resolved:
    """Find the commit that a reference means.

    The Hub is asked, and the cache where the Hub cannot be. A range and the newest version leave
    out yanked versions and prereleases; a version asked for by its name may be either.

    Raises
    ------
    NotFoundError
        No such repository, version, branch, or no version in the range.
    AuthError
        The Hub refuses.
    NetworkError
        The Hub cannot be asked, and the cache does not have it.
    VerificationError
        The version was moved since it was downloaded.
    """
    try:
        return _resolve_on_hub(reference)
    except NetworkError as error:
        found = _resolve_in_cache(reference)
        if found is None:
            raise _not_cached(reference, error) from error
        return found


def pull(reference: Reference, progress: Progress | None = None) -> tuple[Resolved, Path]:
    """Find what a reference means and get it, see `resolve` and `download`."""
    resolved = resolve(reference)
    return resolved, download(resolved, progress)


def search(author: str | None, query: str | None) -> list[dict[str, Any]]:
    """List the mappers on the Hub, most downloaded first.

    Parameters
    ----------
    author
        A user or organisation; None for all.
    query
        A part of the name; None for all.

    Returns
    -------
    list of dict
        `repo_id`, `downloads`, `likes`, `last_modified` (ISO 8601) and `private`.
    """
    with translated("searching for mappers"):
        models = client().list_models(
            filter="kvhub", author=author, search=query, sort="downloads", full=True
        )
        return [
            {
                "repo_id": model.id,
                "downloads": model.downloads,
                "likes": model.likes,
                "last_modified": model.last_modified and model.last_modified.isoformat(),
                "private": bool(model.private),
            }
            for model in models
        ]


def _read_refs(repo_id: str, pull_requests: bool = False) -> "GitRefs":
    with translated(f"reading the versions of {repo_id}"):
        return client().list_repo_refs(repo_id, include_pull_requests=pull_requests)


def _published(refs: "GitRefs", status: Status) -> list[Published]:
    versions = ((parse_tag(tag.name), tag.target_commit) for tag in refs.tags)
    found = [
        Published(version, commit, status.yanked.get(str(version)))
        for version, commit in versions
        if version is not None
    ]
    return sorted(found, key=lambda item: item.version, reverse=True)


def _resolve_on_hub(reference: Reference) -> Resolved:
    repo_id, revision = reference.repo_id, reference.revision
    kind = classify(revision)
    refs = _read_refs(repo_id, pull_requests=kind == "branch")
    status = read_status(repo_id)
    published = _published(refs, status)
    if kind == "commit" or kind == "branch":
        commit = str(revision) if kind == "commit" else _find_branch(reference, refs)
        version = next((item.version for item in published if item.commit == commit), None)
    else:
        chosen = _choose(reference, published)
        commit, version = chosen.commit, chosen.version
    name = None if version is None else str(version)
    if not COMMIT.fullmatch(commit):
        raise NetworkError(
            f"The Hub gave {commit!r} as the commit of {reference}.", "Run the same command again."
        )
    require_unmoved(repo_id, name, commit)
    return Resolved(repo_id, revision, name, commit, status)


def _choose(reference: Reference, published: list[Published]) -> Published:
    """Return the version that is meant, which may only be a yanked one if it is named."""
    named = classify(reference.revision) == "version"
    allowed = [item.version for item in published if named or item.yanked is None]
    version = newest_matching(allowed, reference.revision)
    for item in published:
        if item.version == version:
            return item
    has = [f"{item.version} (yanked)" if item.yanked else str(item.version) for item in published]
    wanted = {"newest": "a version for use", "version": f"version {reference.revision}"}.get(
        classify(reference.revision), f"a version in {reference.revision}"
    )
    raise NotFoundError(
        f"{reference.repo_id} does not have {wanted}; it has: {', '.join(has) or 'none'}.",
        f"See them with: kvhub versions {reference.repo_id}"
        if has
        else f"What was pushed without a version: kvhub pull {reference.repo_id}@main",
    )


def _find_branch(reference: Reference, refs: "GitRefs") -> str:
    known = [*refs.branches, *refs.tags, *(refs.pull_requests or ())]
    for ref in known:
        if reference.revision in (ref.name, ref.ref):
            return str(ref.target_commit)
    raise NotFoundError(
        f"{reference.repo_id} has no branch or tag {reference.revision!r}; it has: "
        f"{', '.join(ref.name for ref in known)}.",
        f"See its versions with `kvhub versions {reference.repo_id}`; a commit is 40 digits.",
    )


def _resolve_in_cache(reference: Reference) -> Resolved | None:
    repo_id, revision = reference.repo_id, reference.revision
    refs = cached_refs(repo_id)
    kind = classify(revision)
    if kind == "commit":
        commit = revision if snapshot(repo_id, str(revision)).is_dir() else None
    elif kind == "version":
        commit = refs.get(tag_of(parse_version(str(revision))))
    elif kind == "branch":
        commit = refs.get(str(revision))
    else:
        whole = [name for name in refs if is_complete(snapshot(repo_id, refs[name]))]
        versions = [version for name in whole if (version := parse_tag(name)) is not None]
        newest = newest_matching(versions, revision)
        commit = None if newest is None else refs[tag_of(newest)]
    if commit is None:
        return None
    version = newest_version(refs, commit)
    return Resolved(repo_id, revision, None if version is None else str(version), commit, None)


def _not_cached(reference: Reference, error: NetworkError) -> NetworkError:
    repo_id = reference.repo_id
    refs = cached_refs(repo_id)
    names = sorted(name for name in refs if is_complete(snapshot(repo_id, refs[name])))
    has = f"of {repo_id} it has {', '.join(names)}" if names else f"it has nothing of {repo_id}"
    return NetworkError(
        f"{error.message} The cache does not have {reference} either: {has}.",
        f"{error.hint} Or take what is there: kvhub pull {repo_id}@{names[-1]}"
        if names
        else error.hint,
    )
