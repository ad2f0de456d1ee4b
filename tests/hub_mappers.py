"""Mappers on the test Hub, put there without the code that pushes."""

import functools
import json
import tempfile
from pathlib import Path

from mapping import random_mapper
from regression import spec

REPO = "org/mapper"
SMALL, LARGE = spec(2, name="org/small"), spec(2, name="org/large")


@functools.cache
def mapper_files(seed=0):
    """The files of a small mapper's package, by name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mapper"
        random_mapper(SMALL, LARGE, seed=seed).save_pretrained(path)
        return {file.name: file.read_bytes() for file in path.iterdir()}


def publish(hub, version=None, seed=0, **files):
    """Commit a mapper to main, with more files and as a version; returns the commit."""
    if REPO not in hub.store.repos:
        hub.create_repo(REPO)
    commit = hub.commit(REPO, {**mapper_files(seed), **files})
    if version is not None:
        hub.move_tag(REPO, f"v{version}", commit)
    return commit


def say(hub, **status):
    """Write the repository's status.json."""
    status = {"schema_version": 1, "yanked": {}, "new_version": None, "deprecated": None, **status}
    hub.commit(REPO, {"status.json": json.dumps(status).encode()})


def asked(hub):
    """What the Hub was asked for since the last call, as `METHOD path`."""
    lines = [f"{request.method} {request.path}" for request in hub.requests]
    hub.requests.clear()
    return lines
