"""Markdown from values that may hold anything: none of them gets out of its place."""

import re
from collections.abc import Sequence
from typing import Any

__all__ = ["code", "fenced", "link", "plain", "table", "text"]

LONGEST = 300  # characters of a value


def plain(value: Any) -> str:
    """A value on one line of printable characters."""
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    line = " ".join(str(value).split())
    return "".join(character for character in line if character.isprintable())


def text(value: Any) -> str:
    """A value as running text or a table's cell: its own Markdown and HTML mean nothing."""
    line = plain(value)
    if len(line) > LONGEST:
        line = f"{line[: LONGEST - 1]}…"
    return re.sub(r"([\\`*\[\]<>|~])", r"\\\1", line)


def code(value: Any) -> str:
    """A value as a code span; not for tables, where a `|` ends the cell in code too."""
    line = plain(value)
    runs = [len(run) for run in re.findall("`+", line)]
    if not runs:
        return f"`{line}`"
    fence = "`" * (max(runs) + 1)
    return f"{fence} {line} {fence}"


def fenced(language: str, content: str) -> str:
    """A block of code."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", f"{content}`")))
    return f"{fence}{language}\n{content}\n{fence}"


def link(label: Any, address: str) -> str:
    """A link; the address has to be one, not a user's text."""
    return f"[{text(label)}]({address})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are Markdown already."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
