"""Run `kcdsl verify` and `kcdsl evaluate` for a clause, as processes of their own."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path

_ENTRY = "import sys; sys.argv[0] = 'kcdsl'; from kcdsl.cli import main; sys.exit(main())"
_SAFE = "-P"
"""Python does not look for modules in the folder of the contract, where the command runs."""
_WORDS = {0: "holds", 1: "is violated", 2: "could not be decided: see the log", 3: "is undecided"}


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended, and what it printed."""

    code: int
    output: str

    def message(self, subject: str) -> str:
        """Return one sentence about the outcome."""
        return f"{subject} {_WORDS.get(self.code, f'ended with status {self.code}')}"


def arguments(command: str, contract: Path, clause: str) -> list[str]:
    """Return the command line that decides a clause; measuring decides the whole contract."""
    words = [sys.executable, _SAFE, "-c", _ENTRY, command, str(contract)]
    return [*words, "--clause", clause] if command == "verify" else words


async def run(command: list[str], folder: Path) -> Finished:
    """Run a command in a folder; cancelling ends the process."""
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "100"}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    assert process.returncode is not None
    return Finished(process.returncode, output.decode("utf-8", "replace"))
