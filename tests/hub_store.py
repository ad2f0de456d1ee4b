"""What the test Hub keeps, in files below a folder.

A blob is a file named by its sha256. A repository is one JSON file, replaced as a whole under one
lock, so that a server that was killed comes back with everything it had acknowledged.
"""

import codecs
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

LFS_SUFFIXES = (".bin", ".png", ".safetensors")
LFS_BYTES = 10_000_000
# What a new repository holds on the Hub, and who is named as its author there.
FIRST_COMMIT = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}
SYSTEM = "system"

REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
REF_NAME = re.compile(r"(?!.*(\.\.|//|@\{|\.lock$|[./]$))[\w+@-][\w./+@-]*")

# path -> {"sha256", "size", "oid" (git's name of it), "lfs"}
Files = dict[str, dict[str, Any]]


class HubError(Exception):
    """An answer other than success, with the code by which the client knows the reason."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str):
        super().__init__(message)
        self.status = status
        self.details: dict[str, str] = {}
        self.headers = {key.replace("_", "-"): value for key, value in headers.items()}
        if code:
            self.headers["X-Error-Code"] = code


@dataclass
class Repo:
    """A repository; `commits` is in the order of their making, and refs map names to commits."""

    id: str
    private: bool
    gated: str | bool
    created: str
    commits: dict[str, dict[str, Any]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    pulls: dict[str, str] = field(default_factory=dict)

    def refs(self) -> dict[str, list[dict[str, str]]]:
        """As the Hub lists them; in the order in which a bare name is looked up."""
        kinds = {
            "branches": ("refs/heads/", self.branches),
            "tags": ("refs/tags/", self.tags),
            "pullRequests": ("", self.pulls),
        }
        return {
            kind: [
                {"name": name, "ref": prefix + name, "targetCommit": commit}
                for name, commit in sorted(refs.items())
            ]
            for kind, (prefix, refs) in kinds.items()
        }

    def resolve(self, revision: str) -> str:
        for refs in self.refs().values():
            for ref in refs:
                if revision in (ref["name"], ref["ref"]):
                    return ref["targetCommit"]
        if re.fullmatch(r"[0-9a-f]{7,40}", revision):
            found = [commit for commit in self.commits if commit.startswith(revision)]
            if len(found) == 1:
                return found[0]
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def files(self, revision: str) -> Files:
        return self.commits[self.resolve(revision)]["files"]

    def snapshot(self) -> dict[str, Any]:
        """All that a push can change, to compare; files are their sha256, by commit."""
        refs = {"branches": self.branches, "tags": self.tags, "pulls": self.pulls}
        files = {
            commit: {path: file["sha256"] for path, file in self.files(commit).items()}
            for names in refs.values()
            for commit in names.values()
        }
        copies = {kind: dict(names) for kind, names in refs.items()}
        return {"private": self.private, "gated": self.gated, **copies, "files": files}

    def history(self, commit: str | None) -> Iterator[str]:
        while commit is not None:
            yield commit
            commit = self.commits[commit]["parent"]


class Store:
    """Every repository of the Hub, and the blobs that they share."""

    def __init__(self, root: Path):
        self.lock = threading.RLock()
        self.blobs, self.uploads, self._states = (
            root / name for name in ("blobs", "uploads", "repos")
        )
        for folder in (self.blobs, self.uploads, self._states):
            folder.mkdir(parents=True, exist_ok=True)
        # What an earlier server left half-way.
        self.xet = root / "xet"
        shutil.rmtree(self.xet, ignore_errors=True)
        self.xet.mkdir()
        loaded = (Repo(**json.loads(path.read_text())) for path in self._states.glob("*/*.json"))
        self.repos = {repo.id: repo for repo in loaded}

    def repo(self, repo_id: str) -> Repo:
        if repo_id not in self.repos:
            raise HubError(404, "Repository not found", "RepoNotFound")
        return self.repos[repo_id]

    def create(self, repo_id: str, private: bool = False, gated: str | bool = False) -> Repo:
        if not REPO_ID.fullmatch(repo_id):
            raise HubError(400, f"Invalid repository name: {repo_id}")
        with self.lock:
            if repo_id in self.repos:
                raise HubError(409, "You already created this model repo")
            repo = self.repos[repo_id] = Repo(repo_id, private, gated, now())
            files = {path: self.add_blob(data, lfs=False) for path, data in FIRST_COMMIT.items()}
            repo.branches["main"] = self._record(repo, None, files, "initial commit", "", SYSTEM)
            self.save(repo)
        return repo

    def delete(self, repo_id: str) -> None:
        with self.lock:
            del self.repos[self.repo(repo_id).id]
            self._state(repo_id).unlink()

    def save(self, repo: Repo) -> None:
        path = self._state(repo.id)
        path.parent.mkdir(exist_ok=True)
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(repo)))
        os.replace(draft, path)

    def _state(self, repo_id: str) -> Path:
        return self._states / f"{repo_id}.json"

    def add_blob(self, data: bytes, lfs: bool) -> dict[str, Any]:
        sha256 = hashlib.sha256(data).hexdigest()
        path = self.blobs / sha256
        if not path.exists():
            self.receive(path, [data])
        return {"sha256": sha256, "size": len(data), "oid": git_oid(data, lfs), "lfs": lfs}

    def lfs_blob(self, sha256: str) -> dict[str, Any]:
        """The entry of an object that is here, verified."""
        size = (self.blobs / sha256).stat().st_size
        oid = git_oid(lfs_pointer(sha256, size), lfs=False)
        return {"sha256": sha256, "size": size, "oid": oid, "lfs": True}

    def read(self, file: dict[str, Any]) -> bytes:
        return (self.blobs / file["sha256"]).read_bytes()

    def receive(self, path: Path, chunks: Iterable[bytes]) -> str:
        """Write a file that is there as a whole or not at all; returns the md5 of its content."""
        digest = hashlib.md5(usedforsecurity=False)
        handle, draft = tempfile.mkstemp(dir=self.uploads)
        try:
            with open(handle, "wb") as file:
                for chunk in chunks:
                    digest.update(chunk)
                    file.write(chunk)
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise
        return digest.hexdigest()

    def has_blob(self, sha256: str) -> bool:
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):
            raise HubError(400, f"Not a sha256: {sha256}")
        return (self.blobs / sha256).exists()

    def assemble(self, sha256: str, parts: int) -> None:
        paths = [self.uploads / f"{sha256}.{number}" for number in range(1, parts + 1)]
        if missing := [path.suffix[1:] for path in paths if not path.exists()]:
            raise HubError(400, f"Parts were not uploaded: {', '.join(missing)}")
        with tempfile.NamedTemporaryFile(dir=self.uploads, delete=False) as whole:
            for path in paths:
                with path.open("rb") as part:
                    shutil.copyfileobj(part, whole)
        os.replace(whole.name, self.uploads / sha256)
        for path in paths:
            path.unlink()

    def verify(self, sha256: str, size: int) -> None:
        """Keep what was uploaded as the object that it should be, or forget it."""
        if self.has_blob(sha256):
            return
        path = self.uploads / sha256
        if not path.exists():
            message = f"LFS pointer pointed to a file that does not exist: {sha256}"
            raise HubError(400, message)
        with path.open("rb") as file:
            found = hashlib.sha256()
            while chunk := file.read(1 << 20):
                found.update(chunk)
            found_size = file.tell()
        if (found.hexdigest(), found_size) != (sha256, size):
            path.unlink()
            raise HubError(400, f"Uploaded object has another size or sha256 than {sha256}")
        os.replace(path, self.blobs / sha256)

    def commit(
        self,
        repo_id: str,
        revision: str,
        operations: Iterable[tuple[str, str, dict[str, Any] | None]],
        *,
        title: str,
        message: str = "",
        author: str = SYSTEM,
        parent: str | None = None,
        create_pr: bool = False,
    ) -> tuple[str, str | None]:
        """Add a commit to a branch, or as a pull request; returns it and the request's name.

        `operations` are ("file", path, blob), ("deletedFile", path, None) or
        ("deletedFolder", path, None), applied in this order.
        """
        with self.lock:
            repo = self.repo(repo_id)
            name = revision.removeprefix("refs/heads/")
            head = repo.resolve(revision)
            refs = repo.branches if name in repo.branches else repo.pulls
            if name not in refs and not create_pr:
                raise HubError(400, f"A commit goes to a branch, and {revision} is none")
            if parent is not None and not head.startswith(parent):
                raise HubError(412, "A commit has happened since. Please refresh and try again.")
            files = _changed(repo.commits[head]["files"], operations)
            pull = None
            if create_pr:
                refs, name = repo.pulls, f"refs/pr/{len(repo.pulls) + 1}"
                pull = name
            commit = self._record(repo, head, files, title, message, author)
            refs[name] = commit
            self.save(repo)
        return commit, pull

    def _record(
        self, repo: Repo, parent: str | None, files: Files, title: str, message: str, author: str
    ) -> str:
        commit = dict(
            parent=parent, title=title, message=message, author=author, date=now(), files=files
        )
        # The count keeps two equal commits apart, which can have the same date.
        content = json.dumps([repo.id, len(repo.commits), commit], sort_keys=True)
        oid = hashlib.sha1(content.encode(), usedforsecurity=False).hexdigest()
        repo.commits[oid] = commit
        return oid

    def add_ref(self, repo_id: str, kind: str, name: str, revision: str) -> None:
        """Make a name in "branches" or "tags"."""
        with self.lock:
            repo = self.repo(repo_id)
            refs = getattr(repo, kind)
            commit = repo.resolve(revision)
            if not REF_NAME.fullmatch(name):
                raise HubError(400, f"Invalid reference name: {name}")
            if name in refs:
                raise HubError(409, f"Reference already exists: {name}")
            refs[name] = commit
            self.save(repo)

    def delete_ref(self, repo_id: str, kind: str, name: str) -> None:
        with self.lock:
            repo = self.repo(repo_id)
            refs = getattr(repo, kind)
            if name not in refs:
                raise HubError(404, f"Reference does not exist: {name}", "RevisionNotFound")
            if kind == "branches" and name == "main":
                raise HubError(403, "The main branch cannot be deleted")
            del refs[name]
            self.save(repo)

    def entries(self, repo: Repo, revision: str, expand: bool = False) -> dict[str, dict[str, Any]]:
        """Every file and folder of a commit, by path."""
        commit = repo.resolve(revision)
        entries = _tree(repo.commits[commit]["files"])
        if expand:
            for path, entry in entries.items():
                entry["lastCommit"] = self._last_change(repo, commit, path, entry["oid"])
        return entries

    def _last_change(self, repo: Repo, commit: str, path: str, oid: str) -> dict[str, str]:
        last = commit
        for earlier in repo.history(commit):
            if _tree(repo.commits[earlier]["files"]).get(path, {}).get("oid") != oid:
                break
            last = earlier
        return {"id": last, **{key: repo.commits[last][key] for key in ("title", "date")}}


def _changed(files: Files, operations: Iterable[tuple[str, str, dict[str, Any] | None]]) -> Files:
    files = dict(files)
    for kind, path, blob in operations:
        if blob is not None:
            if any(part in ("", ".", "..", ".git") for part in path.split("/")):
                raise HubError(400, f"Invalid path in repo: {path!r}")
            files[path] = blob
            continue
        folder = path.rstrip("/") + "/"
        doomed = [name for name in files if name == path or name.startswith(folder)]
        if kind == "deletedFile":
            doomed = [name for name in doomed if name == path]
        if not doomed:
            raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        for name in doomed:
            del files[name]
    for path in files:
        for parent in Path(path).parents:
            if parent.as_posix() in files:
                raise HubError(400, f"{parent.as_posix()} is a file and holds {path}")
    return files


def _tree(files: Files) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    folders: dict[str, list[str]] = {}
    for path, file in files.items():
        entries[path] = {"type": "file", "oid": file["oid"], "size": file["size"], "path": path}
        if file["lfs"]:
            entries[path]["lfs"] = lfs_details(file)
        for parent in Path(path).parents[:-1]:
            folders.setdefault(parent.as_posix(), []).append(f"{path} {file['oid']}\n")
    for path, content in folders.items():
        oid = git_oid("".join(sorted(content)).encode(), lfs=False)
        entries[path] = {"type": "directory", "oid": oid, "size": 0, "path": path}
    return dict(sorted(entries.items()))


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")


def lfs_pointer(sha256: str, size: int) -> bytes:
    version = "version https://git-lfs.github.com/spec/v1"
    return f"{version}\noid sha256:{sha256}\nsize {size}\n".encode()


def git_oid(data: bytes, lfs: bool) -> str:
    if lfs:
        data = lfs_pointer(hashlib.sha256(data).hexdigest(), len(data))
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def lfs_details(file: dict[str, Any]) -> dict[str, Any]:
    """The details of a file outside of git, under the names of both ways to list files."""
    pointer_size = len(lfs_pointer(file["sha256"], file["size"]))
    names = {"oid": file["sha256"], "sha256": file["sha256"]}
    return {**names, "size": file["size"], "pointerSize": pointer_size}


def is_lfs(path: str, size: int, sample: bytes) -> bool:
    """Whether the Hub would keep this file outside of git: by name, by size, or binary."""
    try:
        # A sample may end within a character.
        codecs.getincrementaldecoder("utf-8")().decode(sample)
        binary = b"\0" in sample
    except UnicodeDecodeError:
        binary = True
    return size > 0 and (path.endswith(LFS_SUFFIXES) or size > LFS_BYTES or binary)
