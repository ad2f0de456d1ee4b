"""What is released is complete, and nothing but the package is installed.

Both archives are built offline from a copy of the sources, and the wheel from the sdist, so that
neither can take anything from what else lies in the working tree.
"""

import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import kvhub

ROOT = Path(__file__).parents[1]
PACKAGES = {"kvhub": "kvhub", "exporters": "kvhub/exporters", "cards": "kvhub/cards"}
NAME = f"kvhub-{kvhub.__version__}"
WEIGHTS = (".bin", ".gguf", ".npz", ".pt", ".safetensors")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """What git has or would add, with a few bytes in place of all weights."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout, to know which files belong to the project")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    copy = tmp_path_factory.mktemp("sources")
    for name in filter(None, listing.stdout.split("\0")):
        if (ROOT / name).is_file() and not name.endswith(WEIGHTS):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    for suffix in WEIGHTS:
        (copy / "examples" / f"model{suffix}").write_bytes(b"weights")
    return copy


@pytest.fixture(scope="module")
def archives(sources, tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(sources)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert process.returncode == 0, process.stdout + process.stderr
    return out


@pytest.fixture(scope="module")
def wheel_files(archives):
    with zipfile.ZipFile(archives / f"{NAME}-py3-none-any.whl") as wheel:
        return set(wheel.namelist())


@pytest.fixture(scope="module")
def sdist_files(archives):
    with tarfile.open(archives / f"{NAME}.tar.gz") as sdist:
        members = [Path(member.name) for member in sdist.getmembers() if member.isfile()]
    assert {path.parts[0] for path in members} == {NAME}
    return {path.relative_to(NAME).as_posix() for path in members}


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_wheel_holds_every_file_of_the_package_and_no_other(wheel_files, sources):
    expected = {
        f"{installed}/{file}"
        for folder, installed in PACKAGES.items()
        for file in files(sources / folder)
    }
    assert {"kvhub/py.typed", "kvhub/exporters/__init__.py", "kvhub/cards/__init__.py"} <= expected
    info = f"{NAME}.dist-info"
    found = {file for file in wheel_files if not file.startswith(f"{info}/")}
    assert found == expected
    assert {
        f"{info}/licenses/LICENSE",
        f"{info}/METADATA",
        f"{info}/entry_points.txt",
    } < wheel_files


def test_sdist_holds_all_folders_but_no_weights(sdist_files, sources):
    assert not [file for file in sdist_files if file.endswith(WEIGHTS)]
    folders = ("kvhub/", "exporters/", "cards/", "benchmarks/", "examples/", "tests/")
    expected = {file for file in files(sources) if file.startswith(folders)}
    assert {file for file in expected if not file.endswith(WEIGHTS)} <= sdist_files
    assert {"CHANGELOG.md", "LICENSE", "Makefile", "README.md", "pyproject.toml"} <= sdist_files


def test_the_wheel_alone_is_importable(archives, tmp_path):
    with zipfile.ZipFile(archives / f"{NAME}-py3-none-any.whl") as wheel:
        wheel.extractall(tmp_path)
    code = (
        "import importlib.metadata, sys; sys.path.insert(0, sys.argv[1]);"
        "import kvhub, kvhub.exporters, kvhub.cards;"
        "scripts = importlib.metadata.distribution('kvhub').entry_points;"
        "print(*(m.__file__ for m in (kvhub, kvhub.exporters, kvhub.cards)), sep='\\n');"
        "print(*(callable(script.load()) for script in scripts))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    *homes, scripts = process.stdout.splitlines()
    assert all(Path(home).is_relative_to(tmp_path) for home in homes)
    assert scripts == "True"


def test_metadata_states_the_supported_versions_and_the_licence():
    metadata = importlib.metadata.metadata("kvhub")
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    versions = {
        classifier.rpartition(" ")[2]
        for classifier in metadata.get_all("Classifier")
        if classifier.startswith("Programming Language :: Python :: 3.")
    }
    assert versions == {"3.10", "3.11", "3.12", "3.13"}
