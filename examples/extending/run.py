"""Add something to a copy of the repository, and run the tests of what was added.

    python examples/extending/run.py            # everything that lies here as a patch
    python examples/extending/run.py metric     # one of them

A patch NAME.patch holds all changes that such an addition needs. Its first lines say what is added;
`tests:` names tests that run beside those that the patch adds, and `runs:` a command that writes
files which are made from the sources. Nothing of the repository itself changes.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ROOTS = (".", "backends", "certs", "grammar")


@dataclass(frozen=True, slots=True)
class Extension:
    """A patch: what it adds, the files that it touches, and the tests that show it."""

    name: str
    summary: str
    files: tuple[str, ...]
    tests: tuple[str, ...]
    runs: tuple[str, ...]

    @property
    def patch(self) -> Path:
        """Return the file of the patch."""
        return HERE / f"{self.name}.patch"


def extensions() -> tuple[Extension, ...]:
    """Return all patches of this folder."""
    return tuple(read(path) for path in sorted(HERE.glob("*.patch")))


def read(path: Path) -> Extension:
    """Read a patch."""
    lines = path.read_text(encoding="utf-8").splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("diff "))
    fields: dict[str, list[str]] = {"tests": [], "runs": []}
    for line in lines[:start]:
        word, colon, value = line.partition(": ")
        if colon and word in fields:
            fields[word].append(value.strip())
    files = tuple(line.removeprefix("+++ b/") for line in lines if line.startswith("+++ b/"))
    added = tuple(file for file in files if file.rpartition("/")[2].startswith("test_"))
    tests = (*added, *(word for value in fields["tests"] for word in value.split()))
    return Extension(path.stem, lines[0], files, tuple(dict.fromkeys(tests)), tuple(fields["runs"]))


def try_out(extension: Extension) -> str:
    """Apply a patch to a copy and run its tests; return what went wrong, empty if nothing did."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        _copy(copy)
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(copy / root) for root in ROOTS),
        }
        commands = (
            ["git", "apply", "--whitespace=nowarn", str(extension.patch)],
            *([sys.executable, *shlex.split(run)] for run in extension.runs),
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-x",
                "-p",
                "no:cacheprovider",
                *extension.tests,
            ],
        )
        for command in commands:
            done = subprocess.run(
                command, cwd=copy, env=variables, capture_output=True, text=True, check=False
            )
            if done.returncode:
                return f"{shlex.join(command)}\n{done.stdout[-4000:]}{done.stderr[-2000:]}"
    return ""


def _copy(folder: Path) -> None:
    """Copy the files of the repository, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())


def main() -> int:
    """Try the patches that are named, or all."""
    wanted = sys.argv[1:]
    failed = 0
    for extension in extensions():
        if wanted and extension.name not in wanted:
            continue
        wrong = try_out(extension)
        failed += bool(wrong)
        print(f"{extension.name}: {len(extension.files)} files: {wrong or 'tests passed'}")
        for file in extension.files:
            print(f"  {file}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
