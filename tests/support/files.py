"""Find the source files of the project."""

from __future__ import annotations

import os
from pathlib import Path


def files_below(root: Path) -> tuple[Path, ...]:
    """Return every file below a folder, without those that set-up, builds and runs create."""
    found: list[Path] = []
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if not _left_behind(name))
        # In a second working tree of a repository, .git is a file; a coverage run leaves its data.
        found.extend(
            Path(folder, name) for name in sorted(names) if name not in {".git", ".coverage"}
        )
    return tuple(found)


def _left_behind(folder: str) -> bool:
    if folder in {".git", "__pycache__", "build", "dist", "node_modules", "out", "results"}:
        return True
    return folder.startswith(".venv") or folder.endswith(("_cache", ".egg-info", ".hypothesis"))
