"""Print the README's table of results from the reports in the local store.

for pair in tiny-middle-to-large tiny-small-to-large tiny-large-to-middle; do
    kvhub fit $pair --overwrite && kvhub evaluate $pair
done
python examples/results.py
"""

import json

from kvhub.store import find_mapper, mapper_names

COLUMNS = (
    "mapper",
    "size",
    "R² keys / values",
    "cosine",
    "KL mapped (source alone)",
    "agreement mapped (source alone)",
    "retention (source alone)",
    "gap recovered",
)


def figure(estimate: dict | None) -> str:
    if estimate is None:
        return "undefined"
    return f"{estimate['value']:.2f} [{estimate['low']:.2f}, {estimate['high']:.2f}]"


def row(name: str) -> str | None:
    package = find_mapper(name)
    if not (package / "report.json").is_file():
        return None
    report = json.loads((package / "report.json").read_text(encoding="utf-8"))
    settings = report["settings"]
    mapped, source, target = (
        settings[setting] for setting in ("mapped", "source_alone", "target_alone")
    )
    source_retention = source["accuracy"]["value"] / target["accuracy"]["value"]
    cells = (
        f"`{name}`",
        f"{(package / 'model.safetensors').stat().st_size / 1e6:.1f} MB",
        f"{report['key_r2']:.2f} / {report['value_r2']:.2f}",
        figure(report["attention_output_cosine"]),
        f"{mapped['kl']['value']:.2f} ({source['kl']['value']:.2f})",
        f"{mapped['agreement']['value']:.2f} ({source['agreement']['value']:.2f})",
        f"{figure(report['retention'])} ({source_retention:.2f})",
        figure(report["gap_recovered"]),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|{'---|' * len(COLUMNS)}")
    for name in mapper_names():
        line = row(name)
        if line is not None:
            print(line)
