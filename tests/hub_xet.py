"""Uploads by Xet, for which `hf_xet` accepts a folder in place of its storage service.

The client writes into a folder that is made for each upload, because it locks what is in there for
as long as it lives; the Hub reads copies. Downloads go by plain HTTP, as from a Hub without Xet.
"""

import shutil
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

# Sizes and marks in a shard, which lists the files whose chunks an upload brought.
RECORD, HASH = 48, 32
HAS_SHA256, HAS_VERIFICATION = 1 << 30, 1 << 31
END = b"\xff" * HASH


def write_token(folder: Path) -> dict[str, Any]:
    """What the client asks for before an upload."""
    return {
        "accessToken": "local",
        "exp": int(time.time()) + 86400,
        "casUrl": f"local://{tempfile.mkdtemp(dir=folder)}",
    }


def fetch(folder: Path, sha256: str, size: int, target: Path) -> None:
    """Write a file to `target`, if one of the uploads has it."""
    for shard in folder.glob("*/xet/xorbs/shards/*.mdb"):
        if name := _files(shard.read_bytes()).get(sha256):
            _read(shard.parents[1], name, size, target)
            return


def _read(storage: Path, name: str, size: int, target: Path) -> None:
    from hf_xet import XetFileInfo, XetSession

    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(storage, Path(copy, "xet", "xorbs"))
        with XetSession().new_file_download_group(endpoint=f"local://{copy}") as group:
            group.start_download_file(XetFileInfo(name, size), str(target))


def _files(shard: bytes) -> dict[str, str]:
    """The name in Xet of each file in a shard, by its sha256."""
    found = {}
    at = RECORD
    while (name := shard[at : at + HASH]) != END:
        flags, segments = struct.unpack_from("<II", shard, at + HASH)
        at += RECORD * (1 + segments + (segments if flags & HAS_VERIFICATION else 0))
        if flags & HAS_SHA256:
            found[_hex(shard[at : at + HASH])] = _hex(name)
            at += RECORD
    return found


def _hex(digest: bytes) -> str:
    """Xet stores hashes as four numbers in little-endian order and prints those."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", digest))
