"""What people see: tables and results on stdout, progress and errors on stderr."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from kvhub.errors import KVHubError

__all__ = ["emit", "say", "show_error", "table", "track", "track_files"]


PIPED_WIDTH = 200  # no terminal says how wide, and a narrow guess would cut what is measured


def _out() -> Console:
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    return console


def _err() -> Console:
    return Console(stderr=True)


def emit(result: dict[str, Any], as_json: bool, render: Callable[[], None]) -> None:
    """Print a command's result: one JSON object, or what `render` prints for people."""
    if as_json:
        # NaN is not JSON; a result that holds one is a fault of ours.
        sys.stdout.write(json.dumps(result, allow_nan=False, ensure_ascii=False) + "\n")
    else:
        render()


def say(message: str) -> None:
    """A line of progress or a warning, on stderr."""
    _err().print(escape(message), highlight=False)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table on stdout; columns whose name ends in a blank are aligned to the right."""
    result = Table(title=title, title_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        result.add_column(
            column.strip(),
            justify="right" if column.endswith(" ") else "left",
            overflow="fold",
            no_wrap=number == 0 and len(columns) > 3,
        )
    for row in rows:
        result.add_row(*(escape(str(cell)) for cell in row))
    _out().print(result)


@contextmanager
def track(description: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr; call what it yields with (done, total), total 0 if unknown."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = _err()
    # Under torchrun the bars of several ranks would overwrite each other.
    silent = not console.is_terminal or os.environ.get("RANK", "0") != "0"
    with Progress(*columns, console=console, disable=silent) as progress:
        task = progress.add_task(description, total=None)

        def update(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total or None)

        yield update


@contextmanager
def track_files(description: str) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar in bytes on stderr; call what it yields with (file, done, total)."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    console = _err()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=None)

        def update(file: str, done: int, total: int) -> None:
            named = f"{description} {file}" if file else description
            progress.update(task, description=named, completed=done, total=total or None)

        yield update


def show_error(error: KVHubError, as_json: bool) -> None:
    """One `Error:` line and one `Hint:` line on stderr; with --json also an object on stdout."""
    sys.stderr.write(f"Error: {' '.join(error.message.split())}\n")
    hint = error.hint or "See what the command takes with --help."
    sys.stderr.write(f"Hint: {' '.join(hint.split())}\n")
    if as_json:
        details = {
            "type": type(error).__name__,
            "message": error.message,
            "hint": hint,
            "exit_code": error.exit_code,
        }
        sys.stdout.write(json.dumps({"error": details}, ensure_ascii=False) + "\n")
