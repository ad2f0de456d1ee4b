"""The Hub's client, and what is known about a repository besides its files."""

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvhub import __version__
from kvhub.errors import NetworkError, VerificationError
from kvhub.hub_errors import translated
from kvhub.versions import COMMIT, classify

if TYPE_CHECKING:
    from huggingface_hub import HfApi

__all__ = ["Resolved", "Status", "client", "is_intact", "parse_status", "read_status"]

STATUS = "status.json"


@dataclass(frozen=True)
class Status:
    """What is said about a repository after its versions were made: its status.json on main."""

    yanked: dict[str, str]
    new_version: str | None
    deprecated: str | None


@dataclass(frozen=True)
class Resolved:
    """What a reference is.

    Attributes
    ----------
    requested
        The revision that was asked for; None for the newest version.
    version
        Of the commit; None where it has none.
    commit
        To be used for every file.
    status
        None where the Hub could not be asked, and all else is as the cache has it.
    """

    repo_id: str
    requested: str | None
    version: str | None
    commit: str
    status: Status | None

    def __str__(self) -> str:
        return f"{self.repo_id}@{self.version or self.commit}"

    @property
    def warnings(self) -> list[str]:
        """What somebody who loads this should be told, a sentence each."""
        if self.status is None:
            if classify(self.requested) in ("commit", "version"):
                return []
            return [f"The Hub could not be asked; {self} is the newest in the cache."]
        found = []
        yanked = self.status.yanked.get(self.version or "")
        if yanked is not None:
            found.append(f"Version {self.version} of {self.repo_id} was yanked: {yanked}")
        if self.status.deprecated is not None:
            instead = f" Use {self.status.new_version}." if self.status.new_version else ""
            found.append(f"{self.repo_id} is deprecated: {self.status.deprecated}{instead}")
        return found


def client() -> "HfApi":
    """Return the Hub's client; address and token are those of huggingface_hub's settings."""
    from huggingface_hub import HfApi

    return HfApi(library_name="kvhub", library_version=__version__)


def read_status(repo_id: str) -> Status:
    """Read status.json on main; all is well where there is none.

    Raises
    ------
    VerificationError
        It is not one.
    AuthError, NetworkError, NotFoundError
        The repository cannot be read.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.errors import RemoteEntryNotFoundError
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    # Past the cache, which would keep a damaged one for good.
    headers = build_hf_headers(library_name="kvhub", library_version=__version__)
    with translated(f"reading {STATUS} of {repo_id}"):
        response = get_session().get(hf_hub_url(repo_id, STATUS), headers=headers)
        try:
            hf_raise_for_status(response)
        except RemoteEntryNotFoundError:
            return Status({}, None, None)
    if not is_intact(response.content, response.headers.get("ETag", "")):
        raise NetworkError(f"{STATUS} of {repo_id} arrived damaged.", "Run the same command again.")
    return parse_status(repo_id, response.content)


def parse_status(repo_id: str, content: bytes) -> Status:
    """Read the content of a status.json.

    Raises
    ------
    VerificationError
        It is not one.
    """
    try:
        data = json.loads(content)
    except ValueError:
        data = None
    texts = ("new_version", "deprecated")
    if (
        not isinstance(data, dict)
        or data.get("schema_version") != 1
        or not isinstance(data.get("yanked"), dict)
        or not all(isinstance(reason, str) for reason in data["yanked"].values())
        or not all(isinstance(data.get(name), str | None) for name in texts)
    ):
        raise VerificationError(
            f"{STATUS} of {repo_id} on main is not one that this kvhub reads, so which versions "
            "were yanked is unknown.",
            "Upgrade kvhub (pip install -U kvhub), or tell the owner of the repository.",
        )
    return Status(data["yanked"], data.get("new_version"), data.get("deprecated"))


def is_intact(content: bytes, etag: str) -> bool:
    """Whether a file is what the Hub's name of it says: its digest or, for small ones, git's."""
    etag = etag.removeprefix("W/").strip('"')
    if len(etag) == 64:
        return hashlib.sha256(content).hexdigest() == etag
    blob = b"blob %d\0" % len(content) + content
    digests = [hashlib.sha1(data, usedforsecurity=False).hexdigest() for data in (blob, content)]
    return not COMMIT.fullmatch(etag) or etag in digests
