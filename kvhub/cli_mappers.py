"""The commands of an artifact's life: parse, call, print."""

from pathlib import Path
from typing import Annotated

import typer

from kvhub import artifact_tables, console, tables
from kvhub.cli_options import Json, MapperArgument

__all__ = [
    "deprecate",
    "diff",
    "info",
    "list_mappers",
    "lock",
    "pull",
    "push",
    "sync",
    "unyank",
    "verify",
    "versions",
    "yank",
]

Repository = Annotated[str, typer.Argument(help="org/repo on the Hub.")]
LockFile = Annotated[Path, typer.Option("--file", help="The lock file.")]


def push(
    name: Annotated[str, typer.Argument(help="A mapper in the local store, or a directory.")],
    repo_id: Annotated[
        str | None, typer.Option(help="org/repo; default: your own name on the Hub, and NAME.")
    ] = None,
    version: Annotated[
        str | None, typer.Option(help="Such as 1.2.0; default: what the changes demand.")
    ] = None,
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Of the repository; checked.")
    ] = None,
    create_pr: Annotated[bool, typer.Option(help="Open a pull request, make no version.")] = False,
    license: Annotated[
        str | None, typer.Option(help="For the card; default: what both models demand.")
    ] = None,
    private_key: Annotated[
        Path | None, typer.Option(help="Sign the version with this key (extra `sign`).")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Show what would happen, change nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Publish a local mapper: one commit, one version tag that never moves.

    Example: kvhub push qwen3-8b-to-32b --repo-id org/qwen3-8b-to-32b
    """
    from kvhub.pipeline import default_repo_id, local_mapper
    from kvhub.publishing import plan
    from kvhub.publishing import push as publish

    directory = local_mapper(name)
    repo_id = repo_id or default_repo_id(directory.name)
    if dry_run:
        planned = plan(
            directory,
            repo_id,
            version=version,
            private=private,
            create_pr=create_pr,
            license=license,
        )
        console.emit(planned.to_dict(), as_json, lambda: artifact_tables.show_plan(planned))
        return
    with console.track_files(f"Push {repo_id}") as progress:
        pushed = publish(
            directory,
            repo_id,
            version=version,
            private=private,
            create_pr=create_pr,
            license=license,
            private_key=private_key,
            progress=progress,
        )
    console.emit(pushed.to_dict(), as_json, lambda: artifact_tables.show_pushed(pushed))


def pull(
    reference: Annotated[str, typer.Argument(help="org/repo[@version]; a range such as ^1.2 too.")],
    as_json: Json = False,
) -> None:
    """Download a mapper into the Hub's cache and verify it.

    Example: kvhub pull org/qwen3-8b-to-32b@^1.2
    """
    from kvhub.hub import download, resolve
    from kvhub.versions import parse_reference

    resolved = resolve(parse_reference(reference))
    for warning in resolved.warnings:
        console.say(f"Warning: {warning}")
    with console.track_files(f"Pull {resolved.repo_id}") as progress:
        path = download(resolved, lambda done, total: progress("", done, total))
    result = {
        "repo_id": resolved.repo_id,
        "version": resolved.version,
        "commit": resolved.commit,
        "path": str(path),
    }
    console.emit(result, as_json, lambda: console.table("", ("", "value"), list(result.items())))


def versions(repo_id: Repository, as_json: Json = False) -> None:
    """List the versions of a mapper on the Hub, newest first.

    Example: kvhub versions org/qwen3-8b-to-32b
    """
    from kvhub.hub import list_versions

    found = [
        {"version": str(each.version), "commit": each.commit, "yanked": each.yanked}
        for each in list_versions(repo_id)
    ]
    console.emit(
        {"repo_id": repo_id, "versions": found},
        as_json,
        lambda: artifact_tables.show_versions(repo_id, found),
    )


def info(mapper: MapperArgument, as_json: Json = False) -> None:
    """Show what a mapper is, from its config.

    Example: kvhub info tiny-middle-to-large
    """
    from kvhub.package import read_config
    from kvhub.store import find_mapper

    path = find_mapper(mapper)
    data = read_config(path)[1]
    console.emit({"path": str(path), **data}, as_json, lambda: tables.show_config(str(path), data))


def list_mappers(
    author: Annotated[str | None, typer.Option(help="Search the Hub: whose mappers.")] = None,
    search: Annotated[str | None, typer.Option(help="Search the Hub: words in names.")] = None,
    as_json: Json = False,
) -> None:
    """List the mappers in the local store and the Hub's cache, or search the Hub.

    Example: kvhub list

    Example: kvhub list --author org
    """
    from kvhub.hub import cached
    from kvhub.hub import search as search_hub
    from kvhub.pipeline import list_store

    if author is not None or search is not None:
        hits = search_hub(author, search)
        console.emit({"hub": hits}, as_json, lambda: artifact_tables.show_hits(hits))
        return
    found, downloaded = list_store(), cached()

    def render() -> None:
        tables.show_store(found)
        if downloaded:
            artifact_tables.show_cached(downloaded)

    console.emit({"mappers": found, "cached": downloaded}, as_json, render)


def diff(
    first: Annotated[str, typer.Argument(help="A local name, a directory or org/repo@version.")],
    second: Annotated[str, typer.Argument(help="The same.")],
    as_json: Json = False,
) -> None:
    """Compare two mappers: compatibility, settings, figures and tensors.

    Example: kvhub diff org/qwen3-8b-to-32b@1.0.0 qwen3-8b-to-32b
    """
    from kvhub.difference import compare_packages
    from kvhub.store import find_mapper

    found = compare_packages(find_mapper(first), find_mapper(second))
    console.emit(
        found.to_dict(),
        as_json,
        lambda: artifact_tables.show_difference(first, second, found),
    )


def verify(
    mapper: MapperArgument,
    public_key: Annotated[
        Path | None, typer.Option(help="Also require a signature by this key (extra `sign`).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every file of a mapper against its manifest, and its tensors against its config.

    Example: kvhub verify tiny-middle-to-large
    """
    from kvhub.package import Manifest, load
    from kvhub.store import find_mapper

    path = find_mapper(mapper, public_key)
    load(path)
    manifest = Manifest.read(path)
    files = manifest.files
    result = {
        "path": str(path),
        "files": len(files),
        "size_bytes": manifest.size_bytes,
        "signed": public_key is not None,
    }
    console.emit({"verified": True, **result}, as_json, lambda: tables.show_files(str(path), files))


def lock(
    references: Annotated[list[str], typer.Argument(help="org/repo[@version] ...")],
    file: LockFile = Path("kvhub.lock"),
    as_json: Json = False,
) -> None:
    """Write down which commits of mappers a project uses, with the digest of every byte.

    Example: kvhub lock org/qwen3-8b-to-32b@^1.2
    """
    from kvhub.lockfile import lock as write_lock

    entries = write_lock(references, file)
    console.emit(
        {"file": str(file), "mappers": entries},
        as_json,
        lambda: artifact_tables.show_locked(str(file), entries),
    )


def sync(
    file: LockFile = Path("kvhub.lock"),
    frozen: Annotated[bool, typer.Option(help="Take the locked commits, update nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Download what a lock file names, and without --frozen move on to newer versions in range.

    Example: kvhub sync --frozen
    """
    from kvhub.lockfile import sync as synchronize

    synced = synchronize(file, frozen)
    console.emit(
        {"file": str(file), "mappers": [each.to_dict() for each in synced]},
        as_json,
        lambda: artifact_tables.show_synced(str(file), synced),
    )


def deprecate(
    repo_id: Repository,
    reason: Annotated[str, typer.Option(help="Shown to whoever loads the mapper.")],
    new_version: Annotated[str | None, typer.Option(help="What to use instead: org/repo.")] = None,
    as_json: Json = False,
) -> None:
    """Tell the users of a mapper on the Hub to use another one.

    Example: kvhub deprecate org/old --reason "better fit" --new-version org/new
    """
    from kvhub.status import deprecate as write

    commit = write(repo_id, reason=reason, new_version=new_version)
    _changed(repo_id, commit, as_json)


def yank(
    repo_id: Repository,
    version: Annotated[str, typer.Argument(help="Such as 1.2.0.")],
    reason: Annotated[str, typer.Option(help="Shown to whoever loads the version.")],
    as_json: Json = False,
) -> None:
    """Withdraw a version: ranges skip it, lock files refuse it, loading it by name warns.

    Example: kvhub yank org/qwen3-8b-to-32b 1.2.0 --reason "fitted on padded text"
    """
    from kvhub.status import yank as write

    _changed(repo_id, write(repo_id, version, reason), as_json)


def unyank(
    repo_id: Repository,
    version: Annotated[str, typer.Argument(help="Such as 1.2.0.")],
    as_json: Json = False,
) -> None:
    """Take a withdrawal back.

    Example: kvhub unyank org/qwen3-8b-to-32b 1.2.0
    """
    from kvhub.status import unyank as write

    _changed(repo_id, write(repo_id, version), as_json)


def _changed(repo_id: str, commit: str, as_json: bool) -> None:
    result = {"repo_id": repo_id, "commit": commit}
    console.emit(result, as_json, lambda: console.table("", ("", "value"), list(result.items())))
