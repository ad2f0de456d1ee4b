"""A request to the test Hub: who asks, for what, and the way to the function that answers."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlencode

if __package__:
    from .hub_store import HubError, Repo, Store
else:
    from hub_store import HubError, Repo, Store

ANYBODY = {"name": "tester", "orgs": ["*"], "role": "write"}
CHUNK = 1 << 16


@dataclass(frozen=True)
class Settings:
    """How this Hub behaves.

    `tokens` maps a token to {"name", "orgs", "role"}, where the organisation "*" is all of them and
    a role other than "write" only reads; without `tokens`, every token may do everything.
    `upload_mode` "regular" keeps all files in git. LFS objects above `chunk_size` bytes are
    uploaded in parts, and lists come in pages of `page_size`.
    """

    tokens: dict[str, dict[str, Any]] | None = None
    upload_mode: str = "auto"
    chunk_size: int = 64_000_000
    page_size: int = 1000


@dataclass
class Reply:
    """An answer; its body is bytes, or the part from `start` of `size` bytes of a file."""

    body: bytes | Path = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    start: int = 0
    size: int = -1

    def __post_init__(self) -> None:
        if self.size < 0:
            in_memory = isinstance(self.body, bytes)
            self.size = len(self.body) if in_memory else self.body.stat().st_size

    def chunks(self) -> Iterator[bytes]:
        if isinstance(self.body, bytes):
            yield from [self.body] if self.body else []
            return
        with self.body.open("rb") as file:
            file.seek(self.start)
            left = self.size
            while left:
                chunk = file.read(min(left, CHUNK))
                left -= len(chunk)
                yield chunk


def answer(payload: Any, status: int = 200, **headers: str) -> Reply:
    # As text what JSON does not have: a card may hold a date.
    body = json.dumps(payload, default=str).encode()
    return Reply(body, status, {"Content-Type": "application/json", **headers})


def refusal(error: HubError) -> Reply:
    reply = answer({"error": str(error), **error.details}, error.status)
    message = " ".join(str(error).split()).encode("ascii", "replace").decode()
    reply.headers |= {"X-Error-Message": message, **error.headers}
    return reply


@dataclass
class Call:
    """A request on its way to the function that answers it."""

    store: Store
    settings: Settings
    url: str
    path: str
    query: dict[str, list[str]]
    headers: Message
    chunks: Iterator[bytes]
    identity: dict[str, Any] | None = None
    body: bytes = b""

    def json(self) -> dict[str, Any]:
        return json.loads(self.body or b"{}")

    def flag(self, name: str) -> bool:
        return self.query.get(name, [""])[-1].lower() in ("1", "true")

    def identify(self) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and self.settings.tokens is None:
            self.identity = ANYBODY
        elif token:
            self.identity = self.settings.tokens.get(token)
            if self.identity is None:
                raise HubError(401, "Invalid credentials in Authorization header")

    def owns(self, repo_id: str) -> bool:
        if self.identity is None:
            return False
        names = {self.identity["name"], *self.identity.get("orgs", [])}
        return not names.isdisjoint({repo_id.split("/")[0], "*"})

    def require_identity(self) -> dict[str, Any]:
        if self.identity is None:
            raise HubError(401, "Invalid username or password.")
        return self.identity

    def require_write(self, repo_id: str) -> None:
        if self.require_identity().get("role", "write") != "write" or not self.owns(repo_id):
            raise HubError(403, f"You don't have the rights to write to {repo_id}")

    def repo(self, repo_id: str) -> Repo:
        repo = self.store.repo(repo_id)
        if repo.private and not self.owns(repo_id):
            raise HubError(404, "Repository not found", "RepoNotFound")
        return repo

    def page(self, items: Sequence[Any]) -> Reply:
        start = int(self.query.get("cursor", ["0"])[0])
        stop = start + self.settings.page_size
        headers = {}
        if stop < len(items):
            query = urlencode({**self.query, "cursor": [stop]}, doseq=True)
            headers["Link"] = f'<{self.url}{self.path}?{query}>; rel="next"'
        return answer(items[start:stop], **headers)


@dataclass(frozen=True)
class Route:
    """Requests, and the function that answers them.

    `write` needs the right to change {repo}; `stream` leaves the body to the function.
    """

    method: str
    pattern: re.Pattern[str]
    function: Callable[..., Reply]
    write: bool
    stream: bool


class Routes:
    """The functions that answer, each added by decorating it with the requests it is for."""

    groups: ClassVar = {
        "repo": "[^/]+/[^/]+",
        "path": ".*",
        "sha256": "[0-9a-f]{64}",
        "part": "[0-9]+",
    }

    def __init__(self) -> None:
        self._routes: list[Route] = []

    def __call__(
        self, method: str, path: str, write: bool = False, stream: bool = False
    ) -> Callable[[Callable[..., Reply]], Callable[..., Reply]]:
        def group(match: re.Match[str]) -> str:
            return f"(?P<{match[1]}>{self.groups.get(match[1], '[^/]+')})"

        def add(function: Callable[..., Reply]) -> Callable[..., Reply]:
            pattern = re.compile(re.sub(r"{(\w+)}", group, path))
            self._routes.append(Route(method, pattern, function, write, stream))
            return function

        return add

    def answer(self, method: str, call: Call) -> Reply:
        try:
            call.identify()
            for route in self._routes:
                match = route.pattern.fullmatch(call.path)
                if match and route.method == method:
                    return self._run(route, call, match)
            raise HubError(404, "Sorry, we can't find the page you are looking for.")
        except HubError as error:
            return refusal(error)
        except (KeyError, ValueError) as error:
            return refusal(HubError(400, f"Malformed request: {error!r}"))

    def _run(self, route: Route, call: Call, match: re.Match[str]) -> Reply:
        arguments: dict[str, Any] = {key: unquote(text) for key, text in match.groupdict().items()}
        if route.write:
            call.require_write(arguments["repo"])
        if route.stream:
            return route.function(call, **arguments)
        call.body = b"".join(call.chunks)
        with call.store.lock:
            if "repo" in arguments:
                arguments["repo"] = call.repo(arguments["repo"])
            return route.function(call, **arguments)
