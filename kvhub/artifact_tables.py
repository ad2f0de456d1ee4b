"""What the commands of an artifact's life show; see `kvhub.console` for how it is printed."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvhub.console import say, table
from kvhub.tables import megabytes

if TYPE_CHECKING:
    from kvhub.difference import Difference
    from kvhub.lockfile import Synced
    from kvhub.publishing import Plan, Pushed

__all__ = [
    "show_cached",
    "show_difference",
    "show_hits",
    "show_locked",
    "show_plan",
    "show_pushed",
    "show_synced",
    "show_versions",
]


def show_plan(plan: "Plan") -> None:
    """Every file of a push, and what would become of it."""
    before = f", after {plan.previous}" if plan.previous else ""
    table(
        f"{plan.repo_id} {plan.version} ({plan.bump}{before})",
        ("file", "size ", "action"),
        [(file.name, megabytes(file.size), file.action) for file in plan.files],
    )
    visible = {True: "private", False: "public", None: "as the Hub decides"}[plan.private]
    say(
        f"{megabytes(plan.upload_bytes)} of {megabytes(plan.size_bytes)} would be sent; the "
        f"repository is {visible}. Nothing was changed."
    )


def show_pushed(pushed: "Pushed") -> None:
    """Where a version is now."""
    table(
        "Pushed" if pushed.changed else "Nothing to push: this version is there already",
        ("", "value"),
        [
            ("repository", pushed.repo_id),
            ("version", pushed.version),
            ("tag", pushed.tag or "none before the pull request is merged"),
            ("commit", pushed.commit),
            ("page", pushed.url),
        ],
    )


def show_versions(repo_id: str, versions: Sequence[Mapping[str, Any]]) -> None:
    """The versions of a repository."""
    table(
        f"Versions of {repo_id}",
        ("version", "commit", "withdrawn"),
        [(each["version"], each["commit"], each["yanked"] or "") for each in versions],
    )


def show_hits(hits: Sequence[Mapping[str, Any]]) -> None:
    """What a search of the Hub found."""
    table(
        "Mappers on the Hub",
        ("repository", "downloads ", "likes ", "changed"),
        [(h["repo_id"], h["downloads"], h["likes"], h["last_modified"]) for h in hits],
    )


def show_cached(mappers: Sequence[Mapping[str, Any]]) -> None:
    """What was downloaded."""
    table(
        "Mappers in the Hub's cache",
        ("repository", "revisions", "commit", "size "),
        [
            (m["repo_id"], ", ".join(m["revisions"]), m["commit"][:12], megabytes(m["size_bytes"]))
            for m in mappers
        ],
    )


def show_locked(file: str, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """What a lock file holds now."""
    table(
        file,
        ("repository", "requested", "version", "commit", "digest"),
        [
            (
                repo_id,
                entry["requested"] or "newest",
                entry["version"] or "none",
                entry["commit"][:12],
                entry["digest"][:12],
            )
            for repo_id, entry in entries.items()
        ],
    )


def show_synced(file: str, synced: "Sequence[Synced]") -> None:
    """What a lock file brought."""
    table(
        file,
        ("repository", "version", "before", "path"),
        [
            (
                each.repo_id,
                each.locked.name,
                each.previous.name if each.changed else "same",
                each.path,
            )
            for each in synced
        ],
    )


def show_difference(first: str, second: str, found: "Difference") -> None:
    """What differs between two packages, a table for each kind."""
    if found.identical:
        say(f"{first} and {second} are the same, byte by byte.")
        return
    for title, changes in (
        ("Compatibility", found.compatibility),
        ("Settings", found.config),
        ("Evaluation", found.evaluation),
    ):
        if changes:
            rows = [(c.path, _brief(c.old), _brief(c.new)) for c in changes]
            table(title, ("", first, second), rows)
    if found.metrics:
        metrics = [(m.name, _figure(m.old), _figure(m.new)) for m in found.metrics]
        table("Figures", ("", f"{first} ", f"{second} "), metrics)
    if found.tensors:
        worst = sorted(found.tensors, key=lambda t: -(t.relative or 0))[:12]
        table(
            f"Tensors: {len(found.tensors)} differ, the most are",
            ("tensor", "largest difference ", "relative "),
            [
                (t.name, *(("none" if x is None else f"{x:.3g}") for x in (t.max_abs, t.relative)))
                for t in worst
            ],
        )
    say(f"As a version this is a {found.bump} change.")


def _brief(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _figure(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, int | float):
        return f"{value:.3f}"
    return f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]"
