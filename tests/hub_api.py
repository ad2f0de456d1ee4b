"""What the test Hub answers: one function for each request of the client."""

import base64
import json
import re
from math import ceil
from typing import Any
from urllib.parse import parse_qs

if __package__:
    from . import hub_xet
    from .hub_call import Call, Reply, Routes, answer
    from .hub_card import card_data, card_errors, card_tags
    from .hub_store import HubError, Repo, Store, is_lfs, lfs_details
else:
    import hub_xet
    from hub_call import Call, Reply, Routes, answer
    from hub_card import card_data, card_errors, card_tags
    from hub_store import HubError, Repo, Store, is_lfs, lfs_details

route = Routes()


@route("GET", "/api/whoami-v2")
def whoami(call: Call) -> Reply:
    who = call.require_identity()
    token = {"displayName": "token", "role": who.get("role", "write")}
    orgs = [{"type": "org", "name": name} for name in who.get("orgs", []) if name != "*"]
    auth = {"type": "access_token", "accessToken": token}
    return answer({"type": "user", "name": who["name"], "orgs": orgs, "auth": auth})


@route("POST", "/api/validate-yaml")
def validate_yaml(call: Call) -> Reply:
    content = call.json()["content"]
    errors = [{"message": message} for message in card_errors(content)]
    warnings = []
    if not card_data(content.encode()) and not errors:
        warnings.append({"message": "empty or missing yaml metadata in repo card"})
    return answer({"errors": errors, "warnings": warnings}, 400 if errors else 200)


@route("POST", "/api/repos/create")
def create_repo(call: Call) -> Reply:
    repo_id = _named(call)
    if call.json().get("type", "model") != "model":
        raise HubError(400, "This Hub holds models only")
    url = {"url": f"{call.url}/{repo_id}", "name": repo_id}
    try:
        call.store.create(repo_id, private=bool(_private(call.json())))
    except HubError as error:
        error.details = url
        raise
    return answer(url)


@route("DELETE", "/api/repos/delete")
def delete_repo(call: Call) -> Reply:
    call.store.delete(_named(call))
    return answer({})


@route("PUT", "/api/models/{repo}/settings", write=True)
def change_settings(call: Call, repo: Repo) -> Reply:
    private = _private(call.json())
    repo.private = repo.private if private is None else private
    repo.gated = call.json().get("gated", repo.gated)
    call.store.save(repo)
    return answer({"private": repo.private, "gated": repo.gated})


def _named(call: Call) -> str:
    """The repository in the body, which the caller may write to."""
    wanted = call.json()
    repo_id = f"{wanted.get('organization') or call.require_identity()['name']}/{wanted['name']}"
    call.require_write(repo_id)
    return repo_id


def _private(wanted: dict[str, Any]) -> bool | None:
    if "visibility" in wanted:
        return bool(wanted["visibility"] == "private")
    return wanted.get("private")


@route("POST", "/api/models/{repo}/preupload/{revision}", write=True)
def preupload(call: Call, repo: Repo, revision: str) -> Reply:
    present = repo.files(revision)
    files = []
    for file in call.json()["files"]:
        sample = base64.b64decode(file.get("sample", ""))
        lfs = call.settings.upload_mode == "auto" and is_lfs(file["path"], file["size"], sample)
        mode = "lfs" if lfs else "regular"
        files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
        if old := present.get(file["path"]):
            files[-1]["oid"] = old["sha256"] if old["lfs"] else old["oid"]
    return answer({"files": files})


@route("POST", "/{repo}.git/info/lfs/objects/batch", write=True)
def lfs_batch(call: Call, repo: Repo) -> Reply:
    objects = []
    chunk_size = call.settings.chunk_size
    for wanted in call.json()["objects"]:
        sha256, size = wanted["oid"], wanted["size"]
        objects.append({"oid": sha256, "size": size})
        if call.store.has_blob(sha256):
            continue
        url = f"{call.url}/lfs-storage/{sha256}"
        upload: dict[str, Any] = {"href": url}
        if size > chunk_size:
            parts = range(1, ceil(size / chunk_size) + 1)
            header = {str(part): f"{url}/{part}" for part in parts}
            upload["header"] = {**header, "chunk_size": str(chunk_size)}
        objects[-1]["actions"] = {"upload": upload, "verify": {"href": f"{url}/verify"}}
    return answer({"objects": objects})


# To know the address is to have the permission: the client sends no token to the storage.
@route("PUT", "/lfs-storage/{sha256}", stream=True)
@route("PUT", "/lfs-storage/{sha256}/{part}", stream=True)
def lfs_put(call: Call, sha256: str, part: str | None = None) -> Reply:
    name = f"{sha256}.{part}" if part else sha256
    etag = call.store.receive(call.store.uploads / name, call.chunks)
    return Reply(headers={"ETag": f'"{etag}"'})


@route("POST", "/lfs-storage/{sha256}")
def lfs_complete(call: Call, sha256: str) -> Reply:
    call.store.assemble(sha256, len(call.json()["parts"]))
    return answer({})


@route("POST", "/lfs-storage/{sha256}/verify")
def lfs_verify(call: Call, sha256: str) -> Reply:
    call.store.verify(sha256, call.json()["size"])
    return answer({})


@route("GET", "/api/models/{repo}/xet-write-token/{revision}", write=True)
def xet_write_token(call: Call, repo: Repo, revision: str) -> Reply:
    return answer(hub_xet.write_token(call.store.xet))


@route("POST", "/api/models/{repo}/commit/{revision}", write=True)
def commit(call: Call, repo: Repo, revision: str) -> Reply:
    header: dict[str, Any] = {}
    operations = []
    for line in call.body.splitlines():
        key, value = (entry := json.loads(line))["key"], entry["value"]
        if key == "header":
            header = value
            continue
        blob = None
        if key == "file":
            data = base64.b64decode(value["content"], validate=True)
            if value["path"] == "README.md" and (errors := card_errors(data.decode())):
                raise HubError(400, f"Invalid metadata in README.md. {' '.join(errors)}")
            blob = call.store.add_blob(data, lfs=False)
        elif key == "lfsFile":
            blob = _lfs_blob(call.store, value["oid"], value.get("size", 0))
        operations.append((key, value["path"], blob))
    oid, pull = call.store.commit(
        repo.id,
        revision,
        operations,
        title=header["summary"],
        message=header.get("description", ""),
        author=call.require_identity()["name"],
        parent=header.get("parentCommit"),
        create_pr=call.flag("create_pr"),
    )
    page = f"{call.url}/{repo.id}"
    made = {"success": True, "commitOid": oid, "commitUrl": f"{page}/commit/{oid}"}
    if pull:
        made["pullRequestUrl"] = f"{page}/discussions/{pull.removeprefix('refs/pr/')}"
    return answer(made)


def _lfs_blob(store: Store, sha256: str, size: int) -> dict[str, Any]:
    if not store.has_blob(sha256):
        hub_xet.fetch(store.xet, sha256, size, store.uploads / sha256)
        store.verify(sha256, size)
    return store.lfs_blob(sha256)


@route("POST", "/api/models/{repo}/tag/{revision}", write=True)
def create_tag(call: Call, repo: Repo, revision: str) -> Reply:
    call.store.add_ref(repo.id, "tags", call.json()["tag"], revision)
    return answer({})


@route("DELETE", "/api/models/{repo}/tag/{name}", write=True)
def delete_tag(call: Call, repo: Repo, name: str) -> Reply:
    call.store.delete_ref(repo.id, "tags", name)
    return answer({})


@route("POST", "/api/models/{repo}/branch/{name}", write=True)
def create_branch(call: Call, repo: Repo, name: str) -> Reply:
    call.store.add_ref(repo.id, "branches", name, call.json().get("startingPoint", "main"))
    return answer({})


@route("DELETE", "/api/models/{repo}/branch/{name}", write=True)
def delete_branch(call: Call, repo: Repo, name: str) -> Reply:
    call.store.delete_ref(repo.id, "branches", name)
    return answer({})


@route("GET", "/api/models")
def list_models(call: Call) -> Reply:
    def given(name: str) -> list[str]:
        return [value for value in call.query.get(name, []) if value]

    hidden = ("sha", "lastModified", "siblings") if not call.flag("full") else ()
    hidden += ("cardData",) if not call.flag("cardData") else ()
    found = []
    for repo in call.store.repos.values():
        info = _info(call, repo)
        if (
            not (repo.private and not call.owns(repo.id))
            and all(author == info["author"] for author in given("author"))
            and all(text.lower() in repo.id.lower() for text in given("search"))
            and set(given("filter")) <= set(info["tags"])
        ):
            found.append(info)
    key = call.query.get("sort", ["createdAt"])[0]
    found.sort(key=lambda info: info.get(key, info["createdAt"]), reverse=True)
    found = [{name: info[name] for name in info if name not in hidden} for info in found]
    return call.page(found[: int(call.query.get("limit", [len(found)])[0])])


@route("GET", "/api/models/{repo}")
@route("GET", "/api/models/{repo}/revision/{revision}")
def model_info(call: Call, repo: Repo, revision: str = "main") -> Reply:
    return answer(_info(call, repo, revision))


def _info(call: Call, repo: Repo, revision: str = "main") -> dict[str, Any]:
    commit = repo.resolve(revision)
    files = repo.commits[commit]["files"]
    card = card_data(call.store.read(files["README.md"])) if "README.md" in files else {}
    siblings = [{"rfilename": path} for path in sorted(files)]
    if call.flag("blobs"):
        for entry in siblings:
            file = files[entry["rfilename"]]
            entry |= {"size": file["size"], "blobId": file["oid"]}
            if file["lfs"]:
                entry["lfs"] = lfs_details(file)
    return {
        "id": repo.id,
        "modelId": repo.id,
        "author": repo.id.split("/")[0],
        "sha": commit,
        "createdAt": repo.created,
        "lastModified": repo.commits[repo.branches["main"]]["date"],
        "private": repo.private,
        "gated": repo.gated,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": card_tags(card),
        "library_name": card.get("library_name"),
        "pipeline_tag": card.get("pipeline_tag"),
        "cardData": card,
        "siblings": siblings,
    }


@route("GET", "/api/models/{repo}/refs")
def list_refs(call: Call, repo: Repo) -> Reply:
    refs = {**repo.refs(), "converts": []}
    if not call.flag("include_prs"):
        del refs["pullRequests"]
    return answer(refs)


@route("GET", "/api/models/{repo}/commits/{revision}")
def list_commits(call: Call, repo: Repo, revision: str) -> Reply:
    commits = []
    for oid in repo.history(repo.resolve(revision)):
        made = repo.commits[oid]
        shown = {key: made[key] for key in ("title", "message", "date")}
        commits.append({"id": oid, "authors": [{"user": made["author"]}], **shown})
    return call.page(commits)


@route("GET", "/api/models/{repo}/tree/{revision}")
@route("GET", "/api/models/{repo}/tree/{revision}/{path}")
def tree(call: Call, repo: Repo, revision: str, path: str = "") -> Reply:
    entries = call.store.entries(repo, revision, expand=call.flag("expand"))
    if path and entries.get(path, {}).get("type") != "directory":
        raise no_entry(repo, revision, path)
    folder = f"{path}/" if path else ""
    below = [name for name in entries if name.startswith(folder)]
    if not call.flag("recursive"):
        below = [name for name in below if "/" not in name[len(folder) :]]
    return call.page([entries[name] for name in below])


@route("POST", "/api/models/{repo}/paths-info/{revision}")
def paths_info(call: Call, repo: Repo, revision: str) -> Reply:
    if call.headers.get_content_type() == "application/json":
        wanted = call.json()
    else:
        wanted = parse_qs(call.body.decode())
    expand = str(wanted.get("expand")).lower() in ("true", "['true']")
    entries = call.store.entries(repo, revision, expand=expand)
    return answer([entries[path] for path in wanted.get("paths", []) if path in entries])


@route("GET", "/{repo}/resolve/{revision}/{path}")
def resolve(call: Call, repo: Repo, revision: str, path: str) -> Reply:
    if repo.gated and not call.owns(repo.id):
        raise HubError(403, f"Access to model {repo.id} is restricted.", "GatedRepo")
    commit = repo.resolve(revision)
    file = repo.files(commit).get(path)
    if file is None:
        raise no_entry(repo, revision, path)
    headers = {
        "X-Repo-Commit": commit,
        "ETag": f'"{file["sha256"] if file["lfs"] else file["oid"]}"',
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
    }
    if file["lfs"]:
        headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(file["size"])}
    blob, size = call.store.blobs / file["sha256"], file["size"]
    wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", call.headers.get("Range", ""))
    if wanted is None or wanted[0] == "bytes=-":
        return Reply(blob, headers=headers)
    start = int(wanted[1]) if wanted[1] else max(0, size - int(wanted[2]))
    stop = min(size, int(wanted[2]) + 1) if wanted[1] and wanted[2] else size
    if start >= stop:
        raise HubError(416, "Range not satisfiable", Content_Range=f"bytes */{size}")
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return Reply(blob, 206, headers, start, stop - start)


def no_entry(repo: Repo, revision: str, path: str) -> HubError:
    message = f"{path} does not exist on {revision}"
    return HubError(404, message, "EntryNotFound", X_Repo_Commit=repo.resolve(revision))
