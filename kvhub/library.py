"""Text that every machine with Python has: the standard library's sources and prose.

It differs a little between Python versions, so provenance records the version and a digest.
"""

import ast
import os
import random
import re
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from kvhub.errors import NotFoundError

__all__ = ["BUILT_IN", "HELD_OUT_MODULES", "library_files", "library_passages"]

BUILT_IN = ("stdlib", "stdlib-held-out", "english")
HELD_OUT_MODULES = (
    "argparse", "calendar", "configparser", "csv", "difflib", "fractions", "heapq", "ipaddress",
    "mailbox", "optparse", "pprint", "sched", "shelve", "statistics", "tarfile", "textwrap",
    "threading", "typing", "uuid", "zipfile",
)  # fmt: skip

_SKIPPED_FOLDERS = {
    "__pycache__", "dist-packages", "encodings", "idlelib", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests",
}  # fmt: skip
_TOPICS = "pydoc_data/topics.py"
_LINE_END = re.compile(r"\n+")
_SEED = 0
_MIXED_TEXTS = 16  # texts whose passages are shuffled together
_PROSE_CHARACTERS = 5_000  # at least, of paragraphs joined into one text


def library_files(data: str) -> dict[str, Path]:
    """Find the files that a built-in text is made of.

    Parameters
    ----------
    data
        One of `BUILT_IN`.

    Returns
    -------
    dict
        Path by name; the name is relative to the library, with slashes; sorted by name.

    Raises
    ------
    NotFoundError
        If this Python came without the sources of its library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = {}
    for folder, subfolders, files in os.walk(root):
        # config-* and _sysconfigdata describe how this very Python was built.
        subfolders[:] = [
            name
            for name in subfolders
            if name not in _SKIPPED_FOLDERS and not name.startswith("config-")
        ]
        for file in files:
            if file.endswith(".py") and not file.startswith("_sysconfigdata"):
                path = Path(folder) / file
                found[path.relative_to(root).as_posix()] = path
    if data == "english" and (root / _TOPICS).is_file():
        found[_TOPICS] = root / _TOPICS
    if not found or (data == "english" and _TOPICS not in found):
        raise NotFoundError(
            f"This Python has no complete sources of its standard library in {root}.",
            "Name a text file or folder as the data instead.",
        )
    if data != "english":
        held_out = data == "stdlib-held-out"
        found = {name: path for name, path in found.items() if _is_held_out(name) == held_out}
    return dict(sorted(found.items()))


def library_passages(data: str, characters: int) -> Iterator[str]:
    """Cut a built-in text at line ends into nearly equal passages, mixed with a fixed seed.

    Texts come in a seeded order, and the passages of each `_MIXED_TEXTS` neighbours are shuffled,
    so that a short prefix already has many sources in it.

    Parameters
    ----------
    data
        One of `BUILT_IN`.
    characters
        Length of a passage, roughly.
    """
    mixer = random.Random(_SEED)
    texts = _prose(max(characters, _PROSE_CHARACTERS)) if data == "english" else _sources(data)
    while group := list(islice(texts, _MIXED_TEXTS)):
        passages = [passage for text in group for passage in _cut(text, characters)]
        mixer.shuffle(passages)
        yield from passages


def _is_held_out(name: str) -> bool:
    return any(part.removesuffix(".py") in HELD_OUT_MODULES for part in name.split("/"))


def _cut(text: str, characters: int) -> list[str]:
    count = max(1, round(len(text) / characters))
    cuts = [0]
    for index in range(1, count):
        even = len(text) * index // count
        line_end = _LINE_END.search(text, even)
        cuts.append(line_end.end() if line_end else even)
    return [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def _sources(data: str) -> Iterator[str]:
    paths = list(library_files(data).values())
    random.Random(_SEED).shuffle(paths)
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) > 500:
            yield text


def _prose(characters: int) -> Iterator[str]:
    """Join paragraphs of reference topics and docstrings to texts, each paragraph once."""
    from pydoc_data.topics import topics

    modules = [path for name, path in library_files("english").items() if name != _TOPICS]
    origins: list[Path | str] = [*modules, *(topics[name] for name in sorted(topics))]
    random.Random(_SEED).shuffle(origins)
    seen: set[str] = set()
    gathered: list[str] = []
    for origin in origins:
        text = _docstrings(origin) if isinstance(origin, Path) else origin
        for block in text.split("\n\n"):
            paragraph = " ".join(block.split())
            if paragraph not in seen and _is_prose(paragraph):
                seen.add(paragraph)
                gathered.append(paragraph)
        if sum(map(len, gathered)) >= characters:
            yield "\n\n".join(gathered)
            gathered = []
    if gathered:
        yield "\n\n".join(gathered)


def _docstrings(module: Path) -> str:
    tree = ast.parse(module.read_bytes())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
    return "\n\n".join(text for text in found if text)


def _is_prose(paragraph: str) -> bool:
    """Tell sentences from examples, grammar, tables and lists of names."""
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return len(paragraph) >= 60 and letters >= 0.85 * len(paragraph) and ">>>" not in paragraph
