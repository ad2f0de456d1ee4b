"""A repository of the Hub as it stands at one commit, and what may be added to it.

Whatever is written is looked at afterwards: an answer can be lost on its way, and then only the
repository itself knows whether a commit or a tag was made.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from kvhub.errors import ConflictError, KVHubError, NetworkError, NotFoundError, VerificationError
from kvhub.hub import client, translated

__all__ = ["Content", "Progress", "Remote", "commit", "find_remote", "open_remote", "tag"]

# Called with the name of a file whose upload begins (none at the end), and the bytes that are
# done and that there are in all.
Progress: TypeAlias = Callable[[str, int, int], object]


@dataclass(frozen=True)
class Content:
    """A local file as it should be in a repository."""

    path: Path
    sha256: str
    size: int

    @classmethod
    def of(cls, path: Path) -> "Content":
        """Hash a file."""
        return cls(path, _hash(path, hashlib.sha256()), path.stat().st_size)

    @property
    def entry(self) -> tuple[str, int]:
        """What a manifest says of the file."""
        return self.sha256, self.size


@dataclass(frozen=True)
class RemoteFile:
    """A file in a repository: git's name of it, and the sha256 of one that is kept outside git."""

    size: int | None
    oid: str | None
    sha256: str | None

    def holds(self, content: Content) -> bool:
        """Whether this is that content."""
        if self.size != content.size:
            return False
        if self.sha256 is not None:
            return self.sha256 == content.sha256
        header = hashlib.sha1(b"blob %d\0" % content.size, usedforsecurity=False)
        return self.oid == _hash(content.path, header)


# What should be at each path of a repository; None is no file.
Wanted: TypeAlias = Mapping[str, Content | None]


@dataclass(frozen=True)
class Remote:
    """A repository at one commit."""

    repo_id: str
    commit: str
    private: bool
    files: dict[str, RemoteFile]

    def differing(self, wanted: Wanted) -> dict[str, Content | None]:
        """The part of `wanted` that is not so."""
        return {
            name: content
            for name, content in wanted.items()
            if (
                name in self.files
                if content is None
                else name not in self.files or not self.files[name].holds(content)
            )
        }

    def fetch(self, name: str) -> Path | None:
        """Download a small file into the Hub's cache; None where there is none of this name.

        The client checks the length of a download only, so its content is checked here.
        """
        if name not in self.files:
            return None
        for force in (False, True):
            with translated(f"reading {name} of {self.repo_id} at {self.commit}"):
                path = Path(
                    client().hf_hub_download(
                        self.repo_id, name, revision=self.commit, force_download=force
                    )
                )
            if self.files[name].holds(Content.of(path)):
                return path
        raise VerificationError(
            f"{name} of {self.repo_id} at {self.commit} arrived damaged twice.",
            "Check the network or the proxy, then try again.",
        )


def find_remote(repo_id: str, revision: str = "main") -> Remote | None:
    """Look at a repository; None where there is none, or none that may be seen."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    with translated(f"reading {repo_id} at {revision}"):
        try:
            info = client().model_info(repo_id, revision=revision, files_metadata=True)
        except RepositoryNotFoundError as error:
            if isinstance(error, GatedRepoError):
                raise
            return None
    if info.sha is None:
        raise NetworkError(
            f"The Hub did not say at which commit {repo_id} is.", "Try again in a minute."
        )
    return Remote(
        repo_id=repo_id,
        commit=info.sha,
        private=bool(info.private),
        files={
            file.rfilename: RemoteFile(file.size, file.blob_id, file.lfs and file.lfs.sha256)
            for file in info.siblings or ()
        },
    )


def open_remote(repo_id: str, revision: str = "main") -> Remote:
    """Look at a repository that has to be there."""
    found = find_remote(repo_id, revision)
    if found is None:
        raise NotFoundError(
            f"There is no repository {repo_id} on the Hub, or none that you may see.",
            "Check the spelling; for a private one, run: hf auth login",
        )
    return found


def commit(
    remote: Remote,
    wanted: Wanted,
    title: str,
    *,
    create_pr: bool = False,
    progress: Progress | None = None,
) -> tuple[str, str | None]:
    """Make `wanted` true on main in one commit, which nobody else's may precede.

    Files that the Hub has already, from this repository or from an upload that was interrupted,
    are not sent again.

    Parameters
    ----------
    remote
        Main, as it was when `wanted` was worked out.
    wanted
        Files to have, and those not to have.
    title
        The commit's message.
    create_pr
        Propose the commit and leave main as it is.
    progress
        See `Progress`; None leaves it to the client, which shows bars in a terminal.

    Returns
    -------
    tuple
        The commit on which all is as wanted, and the address of the pull request if there is one.

    Raises
    ------
    ConflictError
        Somebody else made a commit since.
    """
    changes = remote.differing(wanted)
    if not changes:
        return remote.commit, None
    try:
        return _send(remote, changes, title, create_pr, progress)
    except ConflictError as error:
        raise ConflictError(
            f"Somebody else changed {remote.repo_id} meanwhile: expected main at {remote.commit}, "
            "found it elsewhere. Nothing of it was overwritten.",
            "Run the same command again; it starts from what is there now.",
        ) from error
    except NetworkError:
        made = _newest(remote.repo_id, create_pr)
        if made is None or made[0].commit == remote.commit or made[0].differing(wanted):
            raise
        return made[0].commit, made[1]


def tag(repo_id: str, name: str, target: str) -> None:
    """Name a commit for good.

    Raises
    ------
    ConflictError
        The name is another commit's already.
    """
    failure: KVHubError | None = None
    try:
        with translated(f"making the tag {name} of {repo_id}"):
            client().create_tag(repo_id, tag=name, revision=target)
    except (ConflictError, NetworkError) as error:
        # Either may be the answer to a second attempt whose first one was heard.
        failure = error
    with translated(f"reading the tags of {repo_id}"):
        refs = client().list_repo_refs(repo_id)
    found = next((ref.target_commit for ref in refs.tags if ref.name == name), None)
    if found == target:
        return
    if found is None and failure is not None:
        raise failure
    raise ConflictError(
        f"The tag {name} of {repo_id} should be at {target}; found it at {found}: somebody else "
        "made that version meanwhile.",
        "Run the same command again; without --version it takes the next one.",
    ) from failure


def _send(
    remote: Remote,
    changes: dict[str, Content | None],
    title: str,
    create_pr: bool,
    progress: Progress | None,
) -> tuple[str, str | None]:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    repo_id = remote.repo_id
    contents = {name: content for name, content in changes.items() if content is not None}
    operations: list[Any] = [
        CommitOperationDelete(name) for name in changes if name not in contents
    ]
    done, total = 0, sum(content.size for content in contents.values())
    by_xet = _takes_xet(repo_id, create_pr)
    with ExitStack() as stack:
        if progress is not None:
            stack.enter_context(_without_bars())
        for name, content in contents.items():
            if progress is not None:
                progress(name, done, total)
            # The client sends by Xet whatever it could read in any order, which an open file is
            # not for it; and it gives up where the Hub does not know Xet.
            data = content.path if by_xet else stack.enter_context(content.path.open("rb"))
            with translated(f"uploading {name} to {repo_id}"):
                addition = CommitOperationAdd(name, data)
                _upload(repo_id, addition, create_pr)
            operations.append(addition)
            done += content.size
        if progress is not None:
            progress("", done, total)
        with translated(f"committing to {repo_id}"):
            made = client().create_commit(
                repo_id,
                operations,
                commit_message=title,
                parent_commit=remote.commit,
                create_pr=create_pr,
            )
    return made.oid, made.pr_url


def _upload(repo_id: str, addition: Any, create_pr: bool) -> None:
    """Send a file that is kept outside git; any other is part of the commit itself."""
    try:
        client().preupload_lfs_files(repo_id, [addition], create_pr=create_pr, free_memory=False)
    except RuntimeError as error:
        # All that the client says itself is which file it was.
        failure = error.__cause__ or error
    else:
        return
    raise failure


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep the client from showing its own progress, unless the user's settings decide that."""
    from huggingface_hub import constants
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _takes_xet(repo_id: str, create_pr: bool) -> bool:
    """Whether the Hub has Xet; the client takes it for granted wherever it can use it itself."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    from kvhub import __version__

    # For a pull request, of whoever may not write to main.
    where = "None?create_pr=1" if create_pr else "main"
    with translated(f"asking how to upload to {repo_id}"):
        response = get_session().get(
            f"{client().endpoint}/api/models/{repo_id}/xet-write-token/{where}",
            headers=build_hf_headers(library_name="kvhub", library_version=__version__),
        )
        if response.status_code in (404, 405, 501):
            return False
        hf_raise_for_status(response)
    return True


def _newest(repo_id: str, pull_request: bool) -> tuple[Remote, str | None] | None:
    """Main or the newest pull request as it is now, and the latter's address."""
    if not pull_request:
        return open_remote(repo_id), None
    with translated(f"reading the pull requests of {repo_id}"):
        refs = client().list_repo_refs(repo_id, include_pull_requests=True)
    numbers = [int(ref.name.rpartition("/")[2]) for ref in refs.pull_requests or ()]
    if not numbers:
        return None
    address = f"{client().endpoint}/{repo_id}/discussions/{max(numbers)}"
    return open_remote(repo_id, f"refs/pr/{max(numbers)}"), address


def _hash(path: Path, digest: Any) -> str:
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return str(digest.hexdigest())
