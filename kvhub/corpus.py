"""Where text comes from: the standard library, local files, or a dataset on the Hub.

A `data` argument is one of

- `stdlib`: the Python standard library's modules, without tests and `HELD_OUT_MODULES`;
- `stdlib-held-out`: those modules, on which the embedded models were never trained;
- `english`: prose from the standard library's reference topics and docstrings;
- a path to a .txt, .md, .py, .jsonl or .parquet file, or to a folder of them;
- a dataset id on the Hub, `org/name[:config][@revision]`, whose `train` split is streamed.
"""

import hashlib
import json
import platform
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from kvhub.errors import AuthError, KVHubError, NetworkError, NotFoundError, UsageError
from kvhub.library import BUILT_IN, library_files, library_passages

__all__ = ["describe", "documents", "kind_of"]

_SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
_DATASET_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<config>[^@]+))?(@(?P<revision>.+))?")


def kind_of(data: str) -> Literal["built-in", "files", "dataset"]:
    """Tell what a `data` argument names.

    Raises
    ------
    NotFoundError
        If it is neither a built-in text, an existing path, nor shaped like a dataset id.
    """
    if data in BUILT_IN:
        return "built-in"
    path = Path(data).expanduser()
    if data and path.exists():
        return "files"
    is_path = data.startswith((".", "~")) or path.is_absolute() or path.suffix.lower() in _SUFFIXES
    if not is_path and _DATASET_ID.fullmatch(data):
        return "dataset"
    raise NotFoundError(
        f"There is no text, file or folder {data!r}.",
        f"Use {', '.join(BUILT_IN)}, an existing path, or a dataset id such as "
        "HuggingFaceFW/fineweb-edu:sample-10BT.",
    )


def documents(data: str, *, text_field: str = "text", passage: int = 4096) -> Iterator[str]:
    """Yield the texts of `data`, one at a time, in an order that never changes.

    A text file, a row and a dataset's example is a document each, in their own order (a folder's
    files by path). Built-in texts are passages from many places, see `library_passages`.

    Parameters
    ----------
    data
        See the module's description.
    text_field
        The field or column with the text, for .jsonl, .parquet and datasets.
    passage
        Characters per passage of a built-in text.

    Raises
    ------
    NotFoundError, AuthError, NetworkError
        If the data is not there, not accessible, or the Hub cannot be reached.
    UsageError
        If a file is not what its suffix says, the field is missing, or a package of the `data`
        extra is.
    """
    kind = kind_of(data)
    if kind == "built-in":
        return library_passages(data, passage)
    if kind == "files":
        return _file_texts(_files(data).values(), text_field)
    return _dataset_texts(data, text_field)


def describe(data: str) -> dict[str, Any]:
    """Say where a text comes from, exactly enough to tell whether another is the same.

    Local paths are reduced to their last part, because this is published with a mapper.

    Returns
    -------
    dict
        JSON-able: `data`, `kind`, and
        for files and built-in texts the number of `files`, their `size_bytes` and a `sha256`
        (the file's; of several, that of their `sha256sum` lines in the order of their names);
        for built-in texts also the `python` version;
        for datasets the `split` and the commit as `revision`.

    Raises
    ------
    NotFoundError, AuthError, NetworkError, UsageError
        As `documents`.
    """
    kind = kind_of(data)
    if kind == "dataset":
        repo, config, revision = _dataset_parts(data)
        name = f"{repo}:{config}" if config else repo
        commit = _dataset_commit(repo, revision)
        return {"data": name, "kind": kind, "split": "train", "revision": commit}
    if kind == "built-in":
        files = library_files(data)
        about = {"data": data, "kind": kind, "python": platform.python_version()}
    else:
        files = _files(data)
        about = {"data": Path(data).expanduser().resolve().name, "kind": kind}
    digests = {name: _sha256(path) for name, path in files.items()}
    if len(digests) == 1:
        (sha256,) = digests.values()
    else:
        lines = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
        sha256 = hashlib.sha256(lines.encode()).hexdigest()
    size = sum(path.stat().st_size for path in files.values())
    return {**about, "files": len(files), "size_bytes": size, "sha256": sha256}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _files(data: str) -> dict[str, Path]:
    """Find the files of an existing path: path by name, sorted by name."""
    path = Path(data).expanduser()
    kinds = ", ".join(_SUFFIXES)
    if not path.is_dir():
        if path.suffix.lower() not in _SUFFIXES:
            raise UsageError(
                f"{data} has the suffix {path.suffix!r}, expected one of {kinds}.",
                "Rename or convert the file; plain text of any kind can be .txt.",
            )
        return {path.name: path}
    found = {
        file.relative_to(path).as_posix(): file
        for file in path.rglob("*")
        if file.suffix.lower() in _SUFFIXES and file.is_file()
    }
    visible = {name: file for name, file in found.items() if not f"/{name}".count("/.")}
    if not visible:
        raise NotFoundError(f"There is no {kinds} file in the folder {data}.", "Name another one.")
    return dict(sorted(visible.items()))


def _file_texts(paths: Iterable[Path], text_field: str) -> Iterator[str]:
    for path in paths:
        if path.suffix.lower() == ".jsonl":
            yield from _jsonl_texts(path, text_field)
        elif path.suffix.lower() == ".parquet":
            yield from _parquet_texts(path, text_field)
        else:
            try:
                yield path.read_text(encoding="utf-8-sig")
            except UnicodeDecodeError as error:
                raise UsageError(
                    f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.",
                    "Convert it first, for example with iconv -t UTF-8.",
                ) from None


def _jsonl_texts(path: Path, text_field: str) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UsageError(
                    f"{path}, line {number}: expected one JSON object, found {line[:60]!r} "
                    f"({error}).",
                    "Write one object per line, or name plain text .txt.",
                ) from None
            yield from _text_in(row, text_field, f"{path}, line {number}")


def _parquet_texts(path: Path, text_field: str) -> Iterator[str]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise _missing_extra("pyarrow", "Reading .parquet files") from None
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if text_field not in columns:
                raise _missing_field(str(path), text_field, columns)
            for batch in file.iter_batches(batch_size=64, columns=[text_field]):
                for row in batch.to_pylist():
                    yield from _text_in(row, text_field, str(path))
    except ArrowException as error:
        raise UsageError(
            f"{path} cannot be read as Parquet: {error}.", "Check that the file is complete."
        ) from None


def _text_in(row: object, text_field: str, where: str) -> Iterator[str]:
    """Yield the text of one row, or nothing where it is null."""
    if not isinstance(row, dict):
        raise UsageError(
            f"{where}: expected an object with a field {text_field!r}, found {type(row).__name__}.",
            f'Write each line as {{"{text_field}": "..."}}.',
        )
    if text_field not in row:
        raise _missing_field(where, text_field, list(row))
    text = row[text_field]
    if isinstance(text, str):
        yield text
    elif text is not None:
        raise UsageError(
            f"{where}: the field {text_field!r} holds {type(text).__name__}, expected a string.",
            f"Name the field with the text (text_field): one of {', '.join(row)}.",
        )


def _missing_field(where: str, text_field: str, found: list[str]) -> UsageError:
    return UsageError(
        f"{where}: expected a field {text_field!r}, found {', '.join(found) or 'none'}.",
        "Name the field with the text (text_field).",
    )


def _missing_extra(package: str, purpose: str) -> UsageError:
    return UsageError(
        f"{purpose} needs the package {package}, which is not installed.",
        'Run pip install "kvhub[data]".',
    )


def _dataset_parts(data: str) -> tuple[str, str | None, str | None]:
    match = _DATASET_ID.fullmatch(data)
    if match is None:
        raise UsageError(f"{data!r} is not a dataset id.", "Write org/name[:config][@revision].")
    return match["repo"], match["config"], match["revision"]


def _dataset_texts(data: str, text_field: str) -> Iterator[str]:
    repo, config, revision = _dataset_parts(data)
    try:
        from datasets import load_dataset
    except ImportError:
        raise _missing_extra("datasets", f"Streaming the dataset {repo}") from None
    with _hub_errors(repo):
        examples = load_dataset(repo, config, split="train", revision=revision, streaming=True)
    return _streamed_texts(examples, text_field, repo)


def _streamed_texts(examples: Iterable[Any], text_field: str, repo: str) -> Iterator[str]:
    with _hub_errors(repo):
        for number, row in enumerate(examples):
            yield from _text_in(row, text_field, f"{repo}, example {number}")


def _dataset_commit(repo: str, revision: str | None) -> str | None:
    from huggingface_hub import HfApi

    with _hub_errors(repo):
        commit: str | None = HfApi(library_name="kvhub").dataset_info(repo, revision=revision).sha
    return commit


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Turn what `datasets` and `huggingface_hub` raise into kvhub's errors."""
    from huggingface_hub.errors import HfHubHTTPError

    # huggingface_hub moved from httpx to httpx2 and lets its connection errors through.
    clients = [import_module(name) for name in ("httpx2", "httpx") if find_spec(name)]
    unreachable = (ConnectionError, TimeoutError, *(client.TransportError for client in clients))
    try:
        yield
    except KVHubError:
        raise
    except unreachable as error:
        raise _unreachable(repo, error) from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise AuthError(
                f"The Hub refuses access to the dataset {repo} ({status}).",
                "Run hf auth login, and accept the dataset's terms on its page.",
            ) from None
        if status == 404:
            raise _unknown_dataset(repo, "the Hub answered 404.") from None
        raise _unreachable(repo, error) from None
    except FileNotFoundError as error:
        # `datasets` raises this class for everything; only the text tells the cases apart.
        if "LocalEntryNotFoundError" in f"{type(error).__name__} {error}":
            raise _unreachable(repo, error) from None
        if "gated" in str(error):
            raise AuthError(
                f"The dataset {repo} is gated: {error}",
                "Run hf auth login, and accept the dataset's terms on its page.",
            ) from None
        raise _unknown_dataset(repo, str(error)) from None
    except ValueError as error:
        # An unknown configuration, or no `train` split; the text lists what there is.
        raise _unknown_dataset(repo, str(error)) from None


def _unreachable(repo: str, error: Exception) -> NetworkError:
    return NetworkError(
        f"The dataset {repo} could not be read from the Hub: {' '.join(str(error).split())}",
        f"Try again online, or use local text: a file, a folder or {', '.join(BUILT_IN)}.",
    )


def _unknown_dataset(repo: str, reason: str) -> NotFoundError:
    return NotFoundError(
        f"The dataset {repo} is not on the Hub, or has no such part: {' '.join(reason.split())}",
        "Write org/name[:config][@revision], as on the dataset's page; its train split is read.",
    )
