"""The `kvhub` command: its subcommands, and how errors end it."""

import os
import sys
from typing import Any

import typer

from kvhub import cli_export, cli_mappers, cli_models, cli_refit, cli_repair, console
from kvhub.errors import KVHubError, UsageError

__all__ = ["app", "main"]

app = typer.Typer(
    name="kvhub",
    help="Map one language model's KV cache into another's: fit, evaluate, publish, hand off.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    cli_models.recipes,
    cli_models.check,
    cli_models.fit,
    cli_refit.refit,
    cli_repair.repair,
    cli_models.evaluate,
    cli_models.handoff,
    cli_models.bench,
    cli_mappers.push,
    cli_mappers.pull,
    cli_mappers.versions,
    cli_mappers.info,
    cli_mappers.diff,
    cli_mappers.verify,
    cli_mappers.lock,
    cli_mappers.sync,
    cli_mappers.deprecate,
    cli_mappers.yank,
    cli_mappers.unyank,
    cli_export.export,
    cli_models.env,
):
    app.command()(command)
app.command("list")(cli_mappers.list_mappers)

# What Typer raises for arguments that it cannot parse; it does not export the class itself.
PARSER_ERROR: Any = typer.BadParameter.__base__


def main() -> None:
    """Run the command; errors are an `Error:` and a `Hint:` line and an exit code."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    debug = os.environ.get("KVHUB_DEBUG") == "1"
    as_json = "--json" in sys.argv
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # the bars of the libraries below
    try:
        sys.exit(app(standalone_mode=False))
    except PARSER_ERROR as error:
        # Typer would print it in its own form, and nothing at all for --json.
        command = error.ctx.command_path if error.ctx else "kvhub"
        console.show_error(UsageError(error.format_message(), f"See: {command} --help"), as_json)
        sys.exit(UsageError.exit_code)
    except KVHubError as error:
        if debug:
            raise
        console.show_error(error, as_json)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        console.show_error(
            KVHubError("Interrupted.", "The same command resumes an interrupted calibration."),
            as_json,
        )
        sys.exit(130)
    except Exception as error:  # the one place that turns a fault of ours into a line
        if debug:
            raise
        console.show_error(
            KVHubError(
                f"Unexpected {type(error).__name__}: {error}",
                "Run it again with KVHUB_DEBUG=1 and report the traceback with `kvhub env`.",
            ),
            as_json,
        )
        sys.exit(KVHubError.exit_code)
