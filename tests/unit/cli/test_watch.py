"""`kcdsl lint --watch`: every way in which editors and tools write files is seen once."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kcdsl.cli.common import watch as watching
from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import USAGE
from kcdsl.exits import Exit

GOOD = """kcdsl: 1
contract: c
version: 1.0.0
model: {checkpoint: m.safetensors, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: d.jsonl
slices: {all: {}}
clauses:
  A: {require: p99(kl) <= 1, level: L2}
"""
BAD = GOOD.replace("(kl)", "(kll)")
FOUND = "1 contract: 1 error; 1 fixable with --fix --unsafe-fixes"
NOTHING = "1 contract: nothing found"


def heeding_ctrl_c() -> None:
    """Undo what a shell does to jobs in the background, which the tests may be one of."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Watcher:
    """A running `kcdsl lint --watch`, asked for what it says after each change; both streams are
    one, so that lines come in their order."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kcdsl", "lint", "--watch", "--color", "never", *words],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=heeding_ctrl_c,
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.rstrip("\n"))

    def round(self) -> list[str]:
        """Return what is said until it watches again."""
        said: list[str] = []
        while True:
            line = self.lines.get(timeout=20)
            if line == "watching; Ctrl-C ends":
                return said
            said.append(line)

    def quiet(self) -> bool:
        """Say whether nothing is said for a while."""
        time.sleep(0.6)
        return self.lines.empty()

    def end(self) -> int:
        self.process.send_signal(2)
        return self.process.wait(timeout=10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "m.safetensors").touch()
    (tmp_path / "d.jsonl").touch()
    (tmp_path / "c.kc.yaml").write_text(BAD)
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Watcher]]:
    started: list[Watcher] = []

    def begin(*words: str) -> Watcher:
        started.append(Watcher(folder, *words))
        return started[-1]

    yield begin
    for watcher in started:
        watcher.process.kill()
        watcher.process.wait()


def in_place(path: Path, text: str) -> None:
    path.write_text(text)


def by_renaming(path: Path, text: str) -> None:
    """Write as Vim with backupcopy=no, Emacs and most tools do, keeping the time."""
    status = path.stat()
    new = path.with_name("4913")
    new.write_text(text)
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(new, path)


def by_removing(path: Path, text: str) -> None:
    """Move the old file away, and write the new one a little later, in parts."""
    path.rename(path.with_name("c.kc.yaml~"))
    time.sleep(0.1)
    with path.open("w") as stream:
        stream.write(text[:100])
        stream.flush()
        time.sleep(0.03)
        stream.write(text[100:])


@pytest.mark.full
@pytest.mark.parametrize("write", [in_place, by_renaming, by_removing])
def test_ways_to_write(
    folder: Path, start: Callable[..., Watcher], write: Callable[[Path, str], None]
) -> None:
    watcher = start("c.kc.yaml")
    assert watcher.round()[-1] == FOUND
    write(folder / "c.kc.yaml", GOOD)
    assert watcher.round() == [NOTHING]
    assert watcher.quiet()
    assert watcher.end() == 0


@pytest.mark.full
def test_a_file_that_goes_and_comes_back(folder: Path, start: Callable[..., Watcher]) -> None:
    watcher = start("c.kc.yaml")
    watcher.round()
    (folder / "c.kc.yaml").unlink()
    assert watcher.round() == ["error[KC601]: there is no file c.kc.yaml"]
    (folder / "c.kc.yaml").write_text(GOOD)
    assert watcher.round() == [NOTHING]


@pytest.mark.full
def test_folders_libraries_and_the_configuration(
    folder: Path, start: Callable[..., Watcher]
) -> None:
    (folder / "kcdsl.toml").write_text("")
    watcher = start(".")
    watcher.round()
    new = folder / "new.kc.yaml"
    new.write_text(GOOD.replace('"', "") + "  # kcdsl: ignore[KC208] old\n")
    assert watcher.round()[-1].startswith("2 contracts: 1 error, 1 warning")
    (folder / "kcdsl.toml").write_text('ignore = ["KC900"]\n')
    assert watcher.round()[-1].startswith("2 contracts: 1 error;")
    (folder / "kcdsl.toml").write_text('ignored = ["KC900"]\n')
    assert watcher.round()[0] == "error[KC605]: there is no option `ignored`"
    (folder / "kcdsl.toml").write_text("")
    assert watcher.round()[-1].startswith("2 contracts: 1 error, 1 warning")
    (folder / "notes.txt").write_text("of no interest")
    assert watcher.quiet()


@pytest.mark.full
def test_fixing_while_watching(folder: Path, start: Callable[..., Watcher]) -> None:
    watcher = start("--fix", "--unsafe-fixes", "c.kc.yaml")
    assert watcher.round() == ["1 contract: nothing found; 1 fixed"]
    assert (folder / "c.kc.yaml").read_text() == GOOD
    assert watcher.round() == [NOTHING]
    assert watcher.quiet()


def test_what_stops_the_work_is_shown_and_work_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[int] = []
    file = tmp_path / "a"
    file.touch()

    def work() -> Exit:
        runs.append(1)
        if len(runs) == 1:
            file.write_text("changed meanwhile")
            raise refuse(USAGE, "not now")
        raise KeyboardInterrupt

    monkeypatch.setattr(watching, "_PAUSE", 0.0)
    assert watching.watch(lambda: [file], work) is Exit.COULD_NOT_RUN
    assert len(runs) == 2
    assert "error[KC901]: not now" in capsys.readouterr().err
