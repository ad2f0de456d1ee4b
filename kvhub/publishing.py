"""Publishing a package: one commit on main, and on it one version tag that never moves.

The package is verified before the Hub is asked anything. Then the version follows from what
changed since the newest one, the card is rendered for it, and what main lacks of it is uploaded.
A push that was interrupted anywhere is finished by the same push: what is there is left out, and
where main holds all of the new version it is only tagged.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvhub.errors import NetworkError, NotFoundError, VerificationError
from kvhub.hub import client, translated
from kvhub.release import decide, read_request, staged
from kvhub.remote import Progress, Remote, Wanted, commit, find_remote, open_remote, tag
from kvhub.versions import Version, tag_of

__all__ = ["Plan", "PlannedFile", "Pushed", "plan", "push"]


@dataclass(frozen=True)
class PlannedFile:
    """A file and what a push does with it: `add`, `same` or `delete`."""

    name: str
    size: int
    action: str


@dataclass(frozen=True)
class Plan:
    """What a push would do.

    Attributes
    ----------
    version
        The version that there would be; the one that is there where nothing changed.
    bump
        `first`, `major`, `minor`, `patch`, or `none` where nothing changed.
    previous
        The newest version before.
    size_bytes, upload_bytes
        Of all files, and of those that would be sent.
    private
        None where the repository does not exist and nothing was asked for.
    """

    repo_id: str
    version: str
    bump: str
    previous: str | None
    files: list[PlannedFile]
    size_bytes: int
    upload_bytes: int
    private: bool | None
    create_pr: bool

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


@dataclass(frozen=True)
class Pushed:
    """A version on the Hub; `changed` is False where it was there before, with this content.

    A pull request has no tag: the push after its merge makes it.
    """

    repo_id: str
    version: str
    tag: str | None
    commit: str
    url: str
    changed: bool
    pull_request: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def push(
    directory: Path,
    repo_id: str,
    *,
    version: str | None = None,
    private: bool | None = None,
    create_pr: bool = False,
    license: str | None = None,
    private_key: Path | None = None,
    progress: Progress | None = None,
) -> Pushed:
    """Publish a package as a version of a repository, which is created where there is none.

    Parameters
    ----------
    directory
        The package.
    repo_id
        `org/name`.
    version
        By default the lowest that the changes since the newest version allow: the next major one
        where the tensors' shapes or a base model changed, minor for another fit, patch for
        anything else, and none, without any commit, where nothing changed.
    private
        Create the repository private, or public; one that is there and differs is refused.
    create_pr
        Open a pull request and make no tag; push again once it is merged.
    license
        For the card, instead of the one that follows from the two models.
    private_key
        Sign the version with it, see `kvhub.signing.sign`.
    progress
        See `kvhub.remote.Progress`.

    Raises
    ------
    NotFoundError, VerificationError
        The package is not whole, or the Hub does not hold what was sent.
    UsageError
        The version is lower than the changes demand.
    ConflictError
        The version is there with other content, or somebody else pushed at the same time.
    AuthError, NetworkError
        The Hub refused or did not answer. No version is there by half; push again.
    """
    request = read_request(directory, repo_id, version, license, private_key)
    remote = _look(repo_id, private, create_pr)
    if remote is None:
        with translated(f"creating {repo_id}"):
            client().create_repo(repo_id, private=private, exist_ok=True)
        remote = open_remote(repo_id)
        _require_visibility(remote, private)
    decision = decide(request, remote)
    if decision.there is not None:
        return _pushed(repo_id, decision.version, decision.there.commit, changed=False)
    with staged(request, remote, decision) as wanted:
        try:
            made, pull_request = commit(
                remote,
                wanted,
                f"Version {decision.version}",
                create_pr=create_pr,
                progress=progress,
            )
            _require_whole(repo_id, made, wanted)
            if pull_request is not None:
                return _pushed(repo_id, decision.version, made, pull_request=pull_request)
            tag(repo_id, tag_of(decision.version), made)
        except NetworkError as error:
            raise NetworkError(
                error.message,
                f"{error.hint} It goes on where this push stopped.".lstrip(),
            ) from error
    return _pushed(repo_id, decision.version, made)


def plan(
    directory: Path,
    repo_id: str,
    *,
    version: str | None = None,
    private: bool | None = None,
    create_pr: bool = False,
    license: str | None = None,
) -> Plan:
    """Tell what `push` would do; the Hub is read and not changed."""
    request = read_request(directory, repo_id, version, license, None)
    remote = _look(repo_id, private, create_pr)
    decision = decide(request, remote)
    if decision.there is not None:
        listed = request.package.manifest.files.items()
        files = [PlannedFile(name, size, "same") for name, (_, size) in sorted(listed)]
    else:
        with staged(request, remote, decision) as wanted:
            files = _planned(wanted, remote)
    return Plan(
        repo_id=repo_id,
        version=str(decision.version),
        bump=decision.bump,
        previous=str(decision.newest.version) if decision.newest else None,
        files=files,
        size_bytes=sum(file.size for file in files if file.action != "delete"),
        upload_bytes=sum(file.size for file in files if file.action == "add"),
        private=private if remote is None else remote.private,
        create_pr=create_pr,
    )


def _planned(wanted: Wanted, remote: Remote | None) -> list[PlannedFile]:
    differing = wanted if remote is None else remote.differing(wanted)
    files = []
    for name, content in sorted(wanted.items()):
        if content is not None:
            action = "add" if name in differing else "same"
            files.append(PlannedFile(name, content.size, action))
        elif remote is not None and name in differing:
            files.append(PlannedFile(name, remote.files[name].size or 0, "delete"))
    return files


def _pushed(
    repo_id: str,
    version: Version,
    made: str,
    *,
    changed: bool = True,
    pull_request: str | None = None,
) -> Pushed:
    page = f"{client().endpoint}/{repo_id}"
    return Pushed(
        repo_id=repo_id,
        version=str(version),
        tag=None if pull_request else tag_of(version),
        commit=made,
        url=pull_request or f"{page}/tree/{tag_of(version)}",
        changed=changed,
        pull_request=pull_request,
    )


def _look(repo_id: str, private: bool | None, create_pr: bool) -> Remote | None:
    """Read what there is, and refuse what cannot be done with it."""
    remote = find_remote(repo_id)
    if remote is not None:
        _require_visibility(remote, private)
    elif create_pr:
        raise NotFoundError(
            f"There is no repository {repo_id} to open a pull request in.",
            "Push without --create-pr to create it.",
        )
    return remote


def _require_visibility(remote: Remote, private: bool | None) -> None:
    if private is None or remote.private == private:
        return
    words = {True: "private", False: "public"}
    raise VerificationError(
        f"{remote.repo_id} should be {words[private]}; found it {words[remote.private]}. Nothing "
        "was uploaded.",
        f"Change it at {client().endpoint}/{remote.repo_id}/settings, or push to another "
        "repository.",
    )


def _require_whole(repo_id: str, made: str, wanted: Wanted) -> None:
    """Look at the commit before it gets a name that it keeps."""
    lacking = sorted(open_remote(repo_id, made).differing(wanted))
    if lacking:
        raise VerificationError(
            f"{repo_id} at {made} does not hold what was sent: {lacking} differ. No version was "
            "made of it.",
            "Push again; a .gitignore in the repository can keep files out.",
        )
