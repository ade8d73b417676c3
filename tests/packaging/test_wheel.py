"""The wheel: four packages with their data, identical from the tree and from the sdist."""

from __future__ import annotations

import configparser
import re
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from kcdsl.diagnostics.pages import manual_pages
from tests.support.installed import build

SOURCES = {
    "kcdsl": "kcdsl",
    "kcdsl_grammar": "grammar/kcdsl_grammar",
    "kcdsl_backends": "backends/kcdsl_backends",
    "kcdsl_certs": "certs/kcdsl_certs",
}


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Return the wheel built from the tree."""
    return zipfile.ZipFile(build(repository, "wheel", tmp_path_factory.mktemp("wheel")))


@pytest.fixture(scope="module")
def unpacked(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the root of the unpacked sdist."""
    archive = build(repository, "sdist", tmp_path_factory.mktemp("sdist"))
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    return root


def members(wheel: zipfile.ZipFile) -> set[str]:
    """Return the files of the packages: without metadata, the manual and its page for `man`."""
    other = re.compile(r"[^/]+\.(?:dist-info|data)/|kcdsl/manual/")
    return {name for name in wheel.namelist() if not other.match(name)}


def metadata_file(wheel: zipfile.ZipFile, name: str) -> str:
    """Return the text of one metadata file."""
    (path,) = [n for n in wheel.namelist() if n.endswith(f".dist-info/{name}")]
    return wheel.read(path).decode("utf-8")


def test_wheel_holds_exactly_the_four_packages(wheel: zipfile.ZipFile) -> None:
    assert {name.split("/")[0] for name in members(wheel)} == set(SOURCES)


@pytest.mark.parametrize("package", sorted(SOURCES))
def test_wheel_holds_every_file_of_a_package(
    wheel: zipfile.ZipFile, repository: Path, package: str
) -> None:
    folder = repository / SOURCES[package]
    expected = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".tmp"
    }
    assert f"{package}/py.typed" in expected
    assert {name for name in members(wheel) if name.startswith(f"{package}/")} == expected


def test_grammar_and_schemas_are_shipped(wheel: zipfile.ZipFile) -> None:
    data = {name for name in members(wheel) if not name.endswith((".py", "py.typed"))}
    assert any(name.startswith("kcdsl_grammar/") and name.endswith(".lark") for name in data)
    schemas = {name for name in data if name.endswith(".schema.json")}
    assert {name for name in schemas if name.startswith("kcdsl_grammar/")} == {
        "kcdsl_grammar/contract.schema.json",
        "kcdsl_grammar/ir.schema.json",
        "kcdsl_grammar/training.schema.json",
    }
    assert schemas >= {
        "kcdsl/verdict/verify.schema.json",
        "kcdsl/verdict/report.schema.json",
        "kcdsl_certs/check.schema.json",
    }
    assert {
        f"kcdsl/verdict/html/{name}" for name in ("page.html.j2", "experiment.html.j2", "style.css")
    } <= set(data)


def test_manual_is_in_the_wheel(wheel: zipfile.ZipFile, repository: Path) -> None:
    """`kcdsl explain` prints its pages, and packagers look for those of `man` in this folder."""
    names = set(wheel.namelist())
    assert any(name.endswith(".data/data/share/man/man1/kcdsl.1") for name in names)
    shipped = {name for name in names if name.startswith("kcdsl/manual/")}
    assert {Path(name).stem for name in shipped} == set(manual_pages())
    (page,) = (name for name in shipped if name.endswith("/rollouts.md"))
    source = repository / "docs" / page.removeprefix("kcdsl/manual/")
    assert wheel.read(page) == source.read_bytes()


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    from kcdsl import __version__

    about = Parser().parsestr(metadata_file(wheel, "METADATA"))
    assert about["Name"] == "kcdsl"
    assert about["Version"] == __version__
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Requires-Python"] == ">=3.11"
    required = [line for line in about.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert any(line.startswith("torch<2.14,>=2.8") for line in required)
    assert metadata_file(wheel, "licenses/LICENSE").lstrip().startswith("Apache License")


def test_wheel_entry_points(wheel: zipfile.ZipFile) -> None:
    points = configparser.ConfigParser()
    points.read_string(metadata_file(wheel, "entry_points.txt"))
    assert points["console_scripts"]["kcdsl"] == "kcdsl.cli:main"
    assert points["kcdsl.backends"]["kcdsl"] == "kcdsl_backends:CATALOGUE"


@pytest.mark.full
def test_sdist_builds_the_same_wheel(
    wheel: zipfile.ZipFile, unpacked: Path, tmp_path: Path
) -> None:
    again = zipfile.ZipFile(build(unpacked, "wheel", tmp_path))
    assert {i.filename: i.CRC for i in again.infolist()} == {
        i.filename: i.CRC for i in wheel.infolist()
    }


@pytest.mark.parametrize(
    "name",
    [
        *("Makefile", "constraints.txt", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"),
        *("tests/conftest.py", "examples/demo.sh", "docs/README.md", "bench/common.py"),
    ],
)
def test_sdist_contains_everything_for_development(unpacked: Path, name: str) -> None:
    assert (unpacked / name).is_file()


def test_sdist_omits_generated_files(unpacked: Path) -> None:
    names = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*")}
    assert not [n for n in names if "__pycache__" in n or "/out/" in n or n.startswith(".venv")]
