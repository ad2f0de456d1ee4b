"""References, versions and ranges mean what semantic versioning and npm's ranges say."""

from dataclasses import replace

import pytest
from mapping import config_for
from regression import spec

from kvhub.errors import UsageError
from kvhub.package import Manifest
from kvhub.versions import (
    Reference,
    Version,
    classify,
    is_reference,
    newest_matching,
    next_version,
    parse_reference,
    parse_tag,
    parse_version,
    propose,
    tag_of,
)

COMMIT = "0123456789abcdef" * 2 + "01234567"
RELEASED = ["0.9.0", "1.0.0", "1.1.0", "1.2.0-rc.1", "1.2.0", "1.2.5", "1.10.0", "2.0.0", "2.1.0-a"]
SOURCE, TARGET = spec(2, name="org/small"), spec(3, name="org/large")
CONFIG = config_for(SOURCE, TARGET)
FILES = {
    "config.json": ("c" * 64, 10),
    "model.safetensors": ("d" * 64, 20),
    "README.md": ("e" * 64, 30),
}


@pytest.mark.parametrize(
    "text",
    [
        "org/mapper",
        "org/mapper@1.0.0",
        "org/mapper@v1.0.0-rc.1",
        "org/mapper@^1.2",
        "org/mapper@~1.2",
        "org/mapper@>=1.1,<2",
        "org/mapper@1.x",
        f"org/mapper@{COMMIT}",
        "org/mapper@main",
        "org/mapper@refs/pr/3",
        "a/b",
        "Org_1/qwen3-8b.to_32b@feature/x",
    ],
)
def test_a_reference_is_written_as_it_was_read(text):
    assert str(parse_reference(text)) == text
    assert is_reference(text)


def test_a_reference_has_two_parts():
    assert parse_reference("org/mapper@^1.2") == Reference("org/mapper", "^1.2")
    assert parse_reference("org/mapper") == Reference("org/mapper", None)


@pytest.mark.parametrize(
    "text",
    [
        *("", "mapper", "org/", "/mapper", "a/b/c", "or g/mapper", "org/map--per", "org/map..per"),
        *("-org/mapper", "org/mapper.git", "org/mapper.", f"org/{'x' * 97}", "órg/mapper"),
        *("org/mapper@", "org/mapper@../../secret", "org/mapper@a//b", "org/mapper@/etc"),
        *("org/mapper@-x", "org/mapper@a b\n", "org/mapper@^x.y", "org/mapper@>", "org/mapper@a:b"),
    ],
)
def test_what_is_no_reference_is_refused(text):
    with pytest.raises(UsageError) as caught:
        parse_reference(text)
    assert "org" in caught.value.hint or ">=1.1,<2" in caught.value.hint


@pytest.mark.parametrize(
    "text",
    ["mapper", "./mapper", "../mapper", "/tmp/mapper", "~/mapper", "a/b/c", "org/", "mapper@1.0.0"],
)
def test_names_and_paths_are_no_references(text):
    assert not is_reference(text)


@pytest.mark.parametrize(
    ("revision", "kind"),
    [
        (None, "newest"),
        *((text, "version") for text in ("1.2.0", "v1.2.0", "1.2.0-rc.1", "v0.0.0")),
        *((text, "range") for text in ("^1.2", "~1.2.3", ">=1.1,<2", "1.x", "1", "v1", "1.2", "*")),
        *((text, "range") for text in ("=1.2.0", ">= 1.1, < 2", "1.0 - 2.0", "^1 || ^2", "1.2.x")),
        (COMMIT, "commit"),
        *((text, "branch") for text in ("main", COMMIT[:7], "refs/pr/1", "v1-fixes", "1.2.0.4")),
    ],
)
def test_revisions_are_told_apart(revision, kind):
    assert classify(revision) == kind


@pytest.mark.parametrize("revision", ["^", "~>1", "^1.2-rc", ">=1,<x.2", "1.2,main", "=main"])
def test_a_broken_range_is_no_branch(revision):
    with pytest.raises(UsageError, match="not a range"):
        classify(revision)


@pytest.mark.parametrize("version", RELEASED)
def test_tags_and_versions_are_each_others_inverse(version):
    assert str(parse_tag(f"v{version}")) == version
    assert tag_of(parse_version(version)) == tag_of(parse_version(f"v{version}")) == f"v{version}"


@pytest.mark.parametrize("tag", ["1.2.3", "v1.2", "vv1.2.3", "v1.2.3+b", "v01.2.3", "latest", "v"])
def test_other_tags_are_no_versions(tag):
    assert parse_tag(tag) is None


@pytest.mark.parametrize("text", ["1.2", "1.2.3+build", "01.2.3", "1.2.3.4", "main", ""])
def test_what_is_no_version_is_refused(text):
    with pytest.raises(UsageError, match="is not a version"):
        parse_version(text)


@pytest.mark.parametrize(
    ("requested", "found"),
    [
        (None, "2.0.0"),
        ("^1.2", "1.10.0"),
        ("~1.2", "1.2.5"),
        (">=1.1,<2", "1.10.0"),
        (">= 1.1, < 1.2", "1.1.0"),
        ("1.x", "1.10.0"),
        ("1", "1.10.0"),
        ("v1", "1.10.0"),
        ("1.2", "1.2.5"),
        ("1.0 - 1.2.4", "1.2.0"),
        ("^0.9 || ^1.1", "1.10.0"),
        ("*", "2.0.0"),
        ("^3", None),
        ("^2.1.0-a", "2.1.0-a"),
        ("1.2.0-rc.1", "1.2.0-rc.1"),
        ("v1.0.0", "1.0.0"),
        ("1.2.3", None),
    ],
)
@pytest.mark.parametrize("step", [1, -1])
def test_the_newest_version_in_a_range_is_found(requested, found, step):
    versions = [Version(text) for text in RELEASED[::step]]
    newest = newest_matching(versions, requested)
    assert newest == (None if found is None else Version(found))


def test_prereleases_alone_are_no_newest_version():
    assert newest_matching([Version("1.0.0-rc.1")], None) is None
    assert newest_matching([], "^1") is None


def bump(config=CONFIG, **files):
    changed = {name.replace("_", "."): entry for name, entry in files.items()}
    return propose(CONFIG, Manifest(FILES), config, Manifest({**FILES, **changed}))


OTHER = {"config_json": ("f" * 64, 11)}


@pytest.mark.parametrize(
    "changes",
    [
        {"source": replace(SOURCE, model_id="org/else")},
        {"source": replace(SOURCE, revision="a" * 40)},
        {"target": replace(TARGET, tokenizer_digest="b" * 64)},
        {"target": replace(TARGET, rope=replace(TARGET.rope, rope_theta=5e5))},
        {"target": replace(TARGET, qk_norm=not TARGET.qk_norm)},
        {"heads": "matched"},
        {"top_k": 2, "selection": ((0, 1), (1, 0), (0, 1))},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_another_base_model_or_shape_is_a_major_change(changes):
    assert bump(replace(CONFIG, **changes), **OTHER) == "major"


def test_another_fit_is_a_minor_change():
    assert bump(model_safetensors=("0" * 64, 20)) == "minor"
    assert bump(replace(CONFIG, selection=((1,), (0,), (1,))), **OTHER) == "minor"


def test_anything_else_is_a_patch():
    assert bump(replace(CONFIG, quality={}), **OTHER) == "patch"
    assert bump(report_json=("0" * 64, 5)) == "patch"


def test_the_card_alone_is_no_change():
    assert bump(README_md=("0" * 64, 31)) == "none"
    assert bump() == "none"


@pytest.mark.parametrize(
    ("previous", "part", "following"),
    [
        (None, "minor", "1.0.0"),
        ("1.2.3", "major", "2.0.0"),
        ("1.2.3", "minor", "1.3.0"),
        ("1.2.3", "patch", "1.2.4"),
        ("1.2.3", "none", "1.2.3"),
        ("2.0.0-rc.1", "major", "2.0.0"),
    ],
)
def test_versions_rise_by_what_changed(previous, part, following):
    version = None if previous is None else Version(previous)
    assert next_version(version, part) == Version(following)
