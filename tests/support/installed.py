"""Install the wheel of kcdsl with its requirements alone into a new environment.

Nothing is downloaded: the required packages are copied from this environment.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from tests.support.commands import PLAIN_TERMINAL, Ran


def build(root: Path, target: str, into: Path) -> Path:
    """Build the sdist or the wheel of the project in `root` and return its path."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)]
    subprocess.run(command, cwd=root, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    (made,) = into.iterdir()
    return made


@dataclass(frozen=True, slots=True)
class Installation:
    """An environment in which a wheel is installed."""

    folder: Path

    def run(self, *words: str, cwd: Path, program: str = "kcdsl") -> Ran:
        """Run a program of the environment in a folder."""
        done = subprocess.run(
            [str(self.folder / "bin" / program), *words],
            cwd=cwd,
            env={**os.environ, **PLAIN_TERMINAL, "XDG_CACHE_HOME": str(self.folder / "cache")},
            capture_output=True,
            encoding="utf-8",
            stdin=subprocess.DEVNULL,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)


def install(
    wheel: Path, folder: Path, *extras: str, only: Collection[str] | None = None
) -> Installation:
    """Make an environment and install a wheel with the requirements of some extras.

    With `only`, install just the distributions of these names.
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-qq"]
    command = [*pip, "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    required = folder / "required"
    required.mkdir()
    for found in _required(extras) if only is None else map(distribution, only):
        for name in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            place = Path(str(found.locate_file(name)))
            if place.exists() and not (required / name).exists():
                (required / name).symlink_to(place)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "required.pth").write_text(f"{required}\n", encoding="utf-8")
    return Installation(folder)


def _required(extras: tuple[str, ...]) -> list[Distribution]:
    """Return the distributions that kcdsl requires, with their own requirements."""
    from packaging.requirements import Requirement

    present = {_normalised(found.metadata["Name"]): found for found in distributions()}
    wanted, seen = [("kcdsl", ("", *extras))], dict[str, Distribution]()
    while wanted:
        name, asked = wanted.pop()
        for line in present[name].requires or ():
            needed = Requirement(line)
            marker, other = needed.marker, _normalised(needed.name)
            if marker is not None and not any(marker.evaluate({"extra": e}) for e in asked):
                continue
            if other in present and other not in seen:
                seen[other] = present[other]
                wanted.append((other, ("", *needed.extras)))
    return list(seen.values())


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def first_certificate(place: Installation, folder: Path, model: str) -> list[tuple[Ran, float]]:
    """Run every command from a new contract beside a model to a checked certificate.

    Return the result of each command with its seconds.
    """
    ran: list[tuple[Ran, float]] = []
    for words in (
        ("init", model),
        ("keygen",),
        ("verify", "--block", "attn_0", "--sign", "kcdsl.key"),
        ("check", "out/verify-attn_0.cert.json", "--key", "kcdsl.key.pub"),
    ):
        began = time.perf_counter()
        ran.append((place.run(*words, cwd=folder), time.perf_counter() - began))
    return ran
