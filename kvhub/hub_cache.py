"""What the Hub's cache on this machine holds of mappers.

The client keeps each commit's files in `snapshots/COMMIT` and, in `refs/NAME`, which commit a tag
or branch was. A tag of ours is only written there once its package was verified.
"""

import json
from pathlib import Path
from typing import Any

from kvhub.atomic import write_text
from kvhub.errors import VerificationError
from kvhub.versions import COMMIT, Version, parse_tag

__all__ = [
    "cached",
    "cached_refs",
    "is_complete",
    "newest_version",
    "remember",
    "require_unmoved",
    "snapshot",
]


def snapshot(repo_id: str, commit: str) -> Path:
    """Return the folder of a commit's files, whether it is there or not."""
    return _folder(repo_id) / "snapshots" / commit


def cached_refs(repo_id: str) -> dict[str, str]:
    """Return the commits by the names of the tags and branches that were downloaded."""
    folder = _folder(repo_id) / "refs"
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            commit = path.read_text(encoding="utf-8", errors="replace").strip()
            # Anything else is a file that was just being written.
            if COMMIT.fullmatch(commit):
                found[path.relative_to(folder).as_posix()] = commit
    return found


def is_complete(directory: Path) -> bool:
    """Whether all files are there that the manifest lists; their content is not looked at."""
    try:
        files = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))["files"]
        return all((directory / name).is_file() for name in files)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def require_unmoved(repo_id: str, version: str | None, commit: str) -> None:
    """Refuse a version that is another commit than when it was downloaded.

    Raises
    ------
    VerificationError
        It is.
    """
    known = cached_refs(repo_id).get(f"v{version}", commit)
    if known != commit:
        raise VerificationError(
            f"Version v{version} of {repo_id} was moved: expected commit {known}, as it was "
            f"downloaded before, found {commit}. Versions never change.",
            f"Ask its author why. `kvhub pull {repo_id}@{known}` takes what it was; to accept what "
            f"it is now, delete {_folder(repo_id) / 'refs' / f'v{version}'}",
        )


def remember(repo_id: str, name: str, commit: str) -> None:
    """Write down which commit a tag or branch is, for when the Hub cannot be asked."""
    if cached_refs(repo_id).get(name) == commit:
        return
    try:
        write_text(_folder(repo_id) / "refs" / name, commit)
    except OSError:
        # A cache that may only be read is usable too.
        return


def newest_version(refs: dict[str, str], commit: str) -> Version | None:
    """Return the newest version that is this commit, None where there is none."""
    tags = (parse_tag(name) for name, target in refs.items() if target == commit)
    return max((version for version in tags if version is not None), default=None)


def cached() -> list[dict[str, Any]]:
    """Return the mappers that are in the cache with all their files, by name and version.

    Returns
    -------
    list of dict
        `repo_id`, `version` (None where the commit has none), `revisions` (the names of tags and
        branches it was downloaded as), `commit`, `path` and `size_bytes`.
    """
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    found = []
    for repo in repos:
        for revision in repo.revisions:
            if repo.repo_type != "model" or not _is_mapper(revision.snapshot_path):
                continue
            commit = revision.commit_hash
            version = newest_version(dict.fromkeys(revision.refs, commit), commit)
            found.append(
                {
                    "repo_id": repo.repo_id,
                    "version": None if version is None else str(version),
                    "revisions": sorted(revision.refs),
                    "commit": commit,
                    "path": str(revision.snapshot_path),
                    "size_bytes": revision.size_on_disk,
                }
            )
    return sorted(found, key=lambda entry: (entry["repo_id"], *_order(entry["version"])))


def _order(version: str | None) -> tuple[bool, Version]:
    return version is not None, Version(version or "0.0.0")


def _is_mapper(directory: Path) -> bool:
    if not is_complete(directory):
        return False
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "kvhub_version" in config


def _folder(repo_id: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser() / f"models--{repo_id.replace('/', '--')}"
