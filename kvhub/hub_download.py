"""Getting a package from the Hub into its cache, whole and verified, or not at all."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

from kvhub.errors import NetworkError, NotFoundError, VerificationError
from kvhub.hub_cache import remember, require_unmoved, snapshot
from kvhub.hub_client import Resolved, client, is_intact
from kvhub.hub_errors import translated
from kvhub.versions import classify

__all__ = ["Progress", "download", "download_signed"]

MANIFEST, SIGNATURE = "manifest.json", "kvhub.sig"
# Called with the bytes that are there and that there will be.
Progress: TypeAlias = Callable[[int, int], object]


def download(resolved: Resolved, progress: Progress | None = None) -> Path:
    """Get all files of a package at one commit into the Hub's cache, and verify them.

    What is in the cache is not asked for again, unless it is damaged.

    Parameters
    ----------
    resolved
        From `resolve`.
    progress
        Called with the bytes that are there and that there will be. None leaves it to the
        client, which shows bars in a terminal.

    Raises
    ------
    NotFoundError
        The commit is not there, or is no mapper.
    AuthError, NetworkError
        A file is not in the cache, and the Hub refuses or cannot be asked.
    VerificationError
        What arrived is not what the manifest says, twice; or the version was moved.
    """
    from kvhub.package import verify

    require_unmoved(resolved.repo_id, resolved.version, resolved.commit)
    directory = snapshot(resolved.repo_id, resolved.commit)
    again: frozenset[str] = frozenset()
    fetched_again: set[str] = set()
    failure: VerificationError | None = None
    while True:
        try:
            _fetch(resolved, directory, again, progress)
            verify(directory)
            break
        except NetworkError as error:
            if failure is None:
                raise
            raise VerificationError(
                f"{failure.message} Fetching it again did not work: {error.message}",
                f"With a network: kvhub pull {resolved}",
            ) from error
        except VerificationError as error:
            # A manifest that was damaged itself may have hidden what else is.
            again, failure = _damaged(directory), error
            if again <= fetched_again:
                raise
            fetched_again |= again
    if resolved.version is not None:
        remember(resolved.repo_id, f"v{resolved.version}", resolved.commit)
    if classify(resolved.requested) == "branch":
        remember(resolved.repo_id, str(resolved.requested), resolved.commit)
    return directory


def download_signed(resolved: Resolved, public_key: Path) -> Path:
    """Do as `download`, once the signature of what was downloaded is known to be right.

    The signature itself says which files to get, so that nothing else of a package is parsed
    before it is checked.

    Raises
    ------
    VerificationError
        There is no signature, or not one by this key of these files; or as for `download`.
    UsageError, NotFoundError
        There is no such key, or it is none; see `kvhub.signing.verify_signature`.
    """
    from kvhub.signing import listed_names, verify_signature

    require_unmoved(resolved.repo_id, resolved.version, resolved.commit)
    directory = snapshot(resolved.repo_id, resolved.commit)
    failure: VerificationError | None = None
    for again in (False, True):
        try:
            if not _get(resolved, directory, SIGNATURE, again):
                raise VerificationError(
                    f"{resolved} is not signed: expected the file {SIGNATURE}, found none.",
                    "Ask its author to sign it, or load it without asking for a signature.",
                )
            names = listed_names(directory / SIGNATURE)
            for name in names:
                _get(resolved, directory, name, again)
            _drop_foreign(directory, names)
            verify_signature(directory, public_key)
            break
        except VerificationError as error:
            # Once more, because the cache may be damaged.
            failure = error
            if again:
                raise
        except NetworkError as error:
            if failure is None:
                raise
            raise failure from error
    return download(resolved)


def _fetch(
    resolved: Resolved, directory: Path, again: Iterable[str], progress: Progress | None
) -> None:
    """Download what is missing of a package, and the files named in `again` in any case."""
    from kvhub.package import Manifest

    if not _get(resolved, directory, MANIFEST, MANIFEST in again):
        raise NotFoundError(
            f"{resolved} is no mapper: it has no {MANIFEST}.",
            "Give a repository that `kvhub push` made; `kvhub list` finds them.",
        )
    manifest = Manifest.read(directory)
    missing = [name for name in manifest.files if name in again or not (directory / name).is_file()]
    total = manifest.size_bytes
    done = total - sum(manifest.files[name][1] for name in missing)
    try:
        # Before the rest, so that whoever has all files knows whether there is a signature.
        if missing or resolved.status is not None:
            _get_signature(resolved, directory)
        for name in missing:
            bar = None if progress is None else _bar(progress, done, total)
            if not _get(resolved, directory, name, name in again, bar):
                raise VerificationError(
                    f"The {MANIFEST} of {resolved} lists {name}, which is not there.",
                    "Tell the owner of the repository: no mapper can be made of that commit.",
                )
            done += manifest.files[name][1]
    except NetworkError as error:
        left = [name for name in missing if not (directory / name).is_file()]
        raise NetworkError(
            f"{error.message} The cache lacks {len(left)} of the {len(manifest.files)} files of "
            f"{resolved}.",
            f"With a network: kvhub pull {resolved}",
        ) from error
    if progress is not None:
        progress(total, total)
    _drop_foreign(directory, [MANIFEST, *manifest.files])


def _get(
    resolved: Resolved, directory: Path, name: str, again: bool = False, bar: type | None = None
) -> bool:
    """Download a file, if need be or `again`; False where the Hub says that there is none."""
    from huggingface_hub.errors import RemoteEntryNotFoundError

    path = directory / name
    if again and path.is_file() and not path.is_symlink():
        # Where there are no links the client would keep the old file.
        path.unlink()
    with translated(f"downloading {name} of {resolved}"):
        try:
            client().hf_hub_download(
                resolved.repo_id,
                name,
                revision=resolved.commit,
                force_download=again,
                tqdm_class=bar,
            )
        except RemoteEntryNotFoundError:
            return False
    return True


def _get_signature(resolved: Resolved, directory: Path) -> None:
    from huggingface_hub import try_to_load_from_cache

    # The cache also knows of files that are not there.
    if try_to_load_from_cache(resolved.repo_id, SIGNATURE, revision=resolved.commit) is not None:
        return
    path = directory / SIGNATURE
    if not _get(resolved, directory, SIGNATURE) or not path.is_symlink():
        return
    # The manifest cannot list it, so only its name in the cache says what it should be.
    if not is_intact(path.read_bytes(), path.readlink().name):
        _get(resolved, directory, SIGNATURE, again=True)


def _damaged(directory: Path) -> frozenset[str]:
    """Return the files to download again: the manifest too, which may be what is wrong."""
    from kvhub.package import Manifest

    try:
        expected = Manifest.read(directory).files
    except VerificationError:
        return frozenset({MANIFEST})
    found = Manifest.of(directory).files
    wrong = [name for name in expected if found.get(name) != expected[name]]
    return frozenset({MANIFEST, *wrong})


def _drop_foreign(directory: Path, own: Iterable[str]) -> None:
    """Remove the links to other files of the repository, which other programs downloaded.

    They are no part of the package; their content stays in the cache.
    """
    from kvhub.package import IGNORED

    kept = set(own)
    for path in directory.rglob("*"):
        name = path.relative_to(directory).as_posix()
        part = name in kept or IGNORED.fullmatch(name)
        if path.is_symlink() and not part:
            path.unlink()


def _bar(progress: Progress, done: int, total: int) -> type:
    """Return a progress bar for the client that shows nothing and reports to `progress`."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        seen = 0

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.seen += int(n or 0)
            progress(min(done + self.seen, total), total)

        # With these two the client has one bar for a file that comes by Xet, not two.
        def update_transfer(self, n: float) -> None:
            pass

        def set_transfer_postfix_str(self, *arguments: Any, **options: Any) -> None:
            pass

    return Bar
