"""A Hugging Face Hub on the loopback that accepts pushes, for tests and for use without a network.

    with HubServer(folder) as hub:
        HfApi(endpoint=hub.url, token="any").create_repo("org/name")

or by itself: `python -m tests.hub_server --root FOLDER [--port PORT] [--token TOKEN]`.

It answers what the `huggingface_hub` client asks about models: repositories, commits, LFS uploads,
branches, tags, pull requests, downloads; uploads by Xet too, which the client can be kept from
with HF_HUB_DISABLE_XET=1. Everything is kept below the folder, for the next server.

A test breaks it with `hub.inject(Fault(...))`, acts as somebody else through `hub.commit` and
`hub.move_tag`, and looks at `hub.requests` and `hub.snapshot`.
"""

import argparse
import random
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

if __package__:
    from .hub_api import route
    from .hub_call import ANYBODY, CHUNK, Call, Reply, Settings, refusal
    from .hub_store import HubError, Store, is_lfs
else:
    from hub_api import route
    from hub_call import ANYBODY, CHUNK, Call, Reply, Settings, refusal
    from hub_store import HubError, Store, is_lfs


# For pytest's filterwarnings: what the client itself brings about when it uploads to LFS.
CLIENT_WARNING = "ignore:Use 'content=<...>' to upload:DeprecationWarning"


class Dropped(ConnectionError):
    """The connection ends here."""


@dataclass
class Fault:
    """What goes wrong with the requests in whose "METHOD /path?query" the regex is found.

    ============  ================================================================================
    kind          what happens
    ============  ================================================================================
    status        nothing is done; the answer is `status`, with `message`, `code`, `retry_after`
    drop          nothing is done; the connection closes without an answer
    reset_after   what was asked for is done; the connection closes without an answer
    drop_body     the connection closes after `bytes` bytes of the body, short of its length
    truncate      the answer ends after `bytes` bytes and gives that as its length
    corrupt       one bit of the byte at `bytes` is another
    slow          the body passes in pieces of `bytes` bytes with `delay` seconds before each
    call          `call()` runs first: somebody else was faster
    ============  ================================================================================

    The body is that of the request for a PUT, and of the answer otherwise. A fault lets `after`
    requests pass and then strikes `times` times. Of several, the first that is due takes the
    request, and the others do not see it.
    """

    match: str
    kind: str
    times: float = 1
    after: int = 0
    status: int = 503
    code: str | None = None
    message: str = "injected fault"
    retry_after: int | None = None
    bytes: int = 1
    delay: float = 0.05
    call: Callable[[], object] | None = None
    hits: int = 0

    def due(self, line: str) -> "Fault | None":
        if self.hits >= self.times or not re.search(self.match, line):
            return None
        if self.after > 0:
            self.after -= 1
            return None
        self.hits += 1
        return self

    def refusal(self) -> Reply:
        reply = refusal(HubError(self.status, self.message, self.code))
        if self.retry_after is not None:
            reply.headers["Retry-After"] = str(self.retry_after)
        return reply


@dataclass
class RandomFaults:
    """Faults of these kinds at this rate; the same ones for the same requests in the same order."""

    seed: int
    rate: float
    kinds: Sequence[str]
    match: str = ""
    hits: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def due(self, line: str) -> Fault | None:
        if not re.search(self.match, line) or self._random.random() >= self.rate:
            return None
        self.hits += 1
        kind = self._random.choice(self.kinds)
        status = self._random.choice((429, 500, 502, 503, 504))
        return Fault("", kind, status=status, bytes=self._random.randrange(1, 2000), delay=0.001)


def spoil(body: Iterable[bytes], fault: Fault) -> Iterator[bytes]:
    """As much of a body as comes through, and how."""
    left = fault.bytes
    for number, chunk in enumerate(body):
        if fault.kind in ("drop_body", "truncate"):
            yield chunk[:left]
            left -= len(chunk)
            if left <= 0:
                break
        elif fault.kind == "slow":
            for start in range(0, len(chunk), fault.bytes):
                time.sleep(fault.delay)
                yield chunk[start : start + fault.bytes]
        elif fault.kind == "corrupt" and number == 0:
            at = min(fault.bytes, len(chunk) - 1)
            yield chunk[:at] + bytes([chunk[at] ^ 1]) + chunk[at + 1 :]
        else:
            yield chunk
    if fault.kind == "drop_body":
        raise Dropped


@dataclass(frozen=True)
class Request:
    """What was asked; `status` is 0 where the connection closed without an answer."""

    method: str
    path: str
    status: int
    user_agent: str


class HubServer:
    """The Hub: its content below `root`, its address, and what a test may do to it.

    The other arguments are those of `Settings`.
    """

    def __init__(self, root: str | Path, *, port: int = 0, **settings: Any):
        self.store = Store(Path(root))
        self.settings = Settings(**settings)
        self.requests: list[Request] = []
        self.faults: list[Fault | RandomFaults] = []
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.hub = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self.url = self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "HubServer":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop at once, in the middle of answers too; a second time it does nothing."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
            self._server.close_connections()

    def inject(self, fault: Fault | RandomFaults) -> Fault | RandomFaults:
        with self._lock:
            self.faults.append(fault)
        return fault

    def due(self, line: str) -> Fault | None:
        with self._lock:
            return next((found for fault in self.faults if (found := fault.due(line))), None)

    def create_repo(self, repo_id: str, private: bool = False, gated: str | bool = False) -> None:
        self.store.create(repo_id, private, gated)

    def commit(self, repo_id: str, files: dict[str, bytes | None], revision: str = "main") -> str:
        """Somebody else's push; a file that is None is deleted."""
        operations = []
        for path, data in files.items():
            kind = "deletedFile" if data is None else "file"
            blob = data if data is None else self._blob(path, data)
            operations.append((kind, path, blob))
        return self.store.commit(repo_id, revision, operations, title="Somebody else's")[0]

    def _blob(self, path: str, data: bytes) -> dict[str, Any]:
        lfs = self.settings.upload_mode == "auto" and is_lfs(path, len(data), data[:512])
        return self.store.add_blob(data, lfs)

    def move_tag(self, repo_id: str, tag: str, revision: str) -> None:
        """Point a tag at another commit, whether it exists or not."""
        with self.store.lock:
            repo = self.store.repo(repo_id)
            repo.tags[tag] = repo.resolve(revision)
            self.store.save(repo)

    def snapshot(self, repo_id: str) -> dict[str, Any]:
        """All that a push can change, to compare; empty where there is no such repository."""
        with self.store.lock:
            repo = self.store.repos.get(repo_id)
            return repo.snapshot() if repo else {}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    hub: HubServer

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._connections: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        """Without this, connections that are kept alive would go on being answered."""
        for connection in list(self._connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                # The client was faster.
                continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body are two packets, and the second would wait for the first's acknowledgement.
    disable_nagle_algorithm = True
    server: _Server

    def _handle(self) -> None:
        # Asked for once a process, by whichever request is the first, so it is left out of account.
        if self.path == "/api/agent-harnesses":
            self._send(refusal(HubError(404, "Not found")), None)
            return
        fault = self.server.hub.due(f"{self.command} {self.path}")
        status = 0
        try:
            reply = self._reply(fault)
            status = reply.status
        finally:
            agent = self.headers.get("User-Agent", "")
            request = Request(self.command, self.path, status, agent)
            self.server.hub.requests.append(request)
        self._send(reply, None if self.command == "PUT" else fault)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle

    def _reply(self, fault: Fault | None) -> Reply:
        kind = fault.kind if fault else ""
        if kind == "drop":
            raise Dropped
        if kind == "call":
            fault.call()
        address = urlsplit(self.path)
        body = self._body()
        hub = self.server.hub
        call = Call(
            store=hub.store,
            settings=hub.settings,
            url=hub.url,
            path=address.path,
            query=parse_qs(address.query),
            headers=self.headers,
            chunks=spoil(body, fault) if fault and self.command == "PUT" else body,
        )
        if kind == "status":
            reply = fault.refusal()
        else:
            reply = route.answer("GET" if self.command == "HEAD" else self.command, call)
        # What is left of a request would be taken for the next one.
        for _ in body:
            pass
        if kind == "reset_after":
            raise Dropped
        return reply

    def _body(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while size := int(self.rfile.readline().split(b";")[0], 16):
                yield self._read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return
        left = int(self.headers.get("Content-Length", 0))
        while left:
            yield self._read(min(left, CHUNK))
            left -= min(left, CHUNK)

    def _read(self, size: int) -> bytes:
        data = self.rfile.read(size)
        if len(data) < size:
            raise Dropped
        return data

    def _send(self, reply: Reply, fault: Fault | None) -> None:
        size = reply.size
        if fault and fault.kind == "truncate" and self.command != "HEAD":
            size = min(size, fault.bytes)
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        if self.command == "HEAD":
            return
        chunks = reply.chunks()
        for chunk in spoil(chunks, fault) if fault else chunks:
            self.wfile.write(chunk)

    def log_message(self, *arguments: Any) -> None:
        """Nothing: `requests` has it all."""


def connect_client(monkeypatch: Any, hub: HubServer, cache: Path, xet: bool = False) -> None:
    """Let `huggingface_hub`, until the end of a test, ask this Hub instead of being offline.

    The client reads its settings when it is imported. Of them this sets the address, which it
    also needs where it is given another one, a cache of the test's own, and whether to use Xet,
    whose uploads are files on this machine that no fault reaches.
    """
    from huggingface_hub import constants

    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_XET": not xet,
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(constants, name, value)


def fast_retries(monkeypatch: Any) -> None:
    """Let `huggingface_hub` retry at once, where it would wait up to 8 seconds and 5 times.

    Only its modules see another `time`: the pauses of everything else stay.
    """
    from huggingface_hub import file_download
    from huggingface_hub.utils import _http

    for module in (file_download, _http):
        monkeypatch.setattr(
            module, "time", SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a Hugging Face Hub on the loopback.")
    parser.add_argument("--root", type=Path, required=True, help="folder that keeps the content")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--token", help="accept this token alone; any by default")
    arguments = parser.parse_args()
    tokens = arguments.token and {arguments.token: ANYBODY}
    with HubServer(arguments.root, port=arguments.port, tokens=tokens) as hub:
        sys.stdout.write(f"HF_ENDPOINT={hub.url}\n")
        sys.stdout.flush()
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()
