"""The run checkpoint: results of requests, stored at once, so that a killed run can continue.

The file is a sequence of frames to which frames are only appended. A frame states its length and
has an authentication code of its content and of the previous code, under a secret of the user
(`kcdsl_backends.secret`). So a frame that is incomplete after a kill or crash is detected and
dropped with all after it, and so is one that was changed, written, moved or copied from another
checkpoint without the secret. The first frame is the key: the digest of everything that decides
values, with a random number. A run checkpoint with another key is started anew.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from kcdsl.diagnostics import codes, refuse
from kcdsl.source.output import make_folder, open_to_append
from kcdsl_backends.empirical.table import rows
from kcdsl_backends.empirical.table.evidence import BlockComparison, RequestRun
from kcdsl_backends.empirical.table.rows import Row
from kcdsl_backends.requests import Request
from kcdsl_backends.secret import sealed

_HEAD = struct.Struct("<4scQ32s")
"""Mark, kind, length of the content, code over the previous code, kind and content."""
_MARK = b"kcj3"
_NONCE = 16
_KEY, _RUN, _COMPARISON, _NOTE = b"K", b"R", b"C", b"N"


@dataclass(slots=True)
class RunCheckpoint:
    """The results of an evaluation so far, in memory and in a file.

    `fresh` ignores an existing file; `tell` is called with messages for the user. Only one process
    at a time uses a checkpoint: another one evaluates without.
    """

    path: Path
    fresh: bool = False
    tell: Callable[[str], None] = lambda text: None
    resumed: bytes = b""
    """The bytes of the run checkpoint that was resumed; empty if none was."""
    notes: tuple[str, ...] = ()
    """The notes of the report about it."""
    _file: int | None = None
    _code: bytes = b""
    """The authentication code of the last frame."""
    _made: bool = False
    _runs: dict[str, RequestRun] = field(default_factory=dict)
    _comparisons: dict[tuple[str, str], BlockComparison] = field(default_factory=dict)
    _notes: dict[str, bytes] = field(default_factory=dict)
    _read_bytes: bytes = b""

    def open(self, key: str) -> None:
        """Read the results stored for this key, and open the file for appending.

        Raises Refusal if the file cannot be written.
        """
        self._made = not self.path.parent.exists()
        make_folder(self.path.parent)
        try:
            file = open_to_append(self.path)
        except OSError as error:
            raise self._unwritable(error) from error
        if not _lock(file):
            os.close(file)
            self.tell(f"{self.path} is in use: this evaluation could not be resumed")
            return
        self._file = file
        end = self._read(key)
        try:
            os.ftruncate(file, end)
        except OSError as error:
            raise self._unwritable(error) from error
        if end == 0:
            self._begin(key)

    def run(self, request: Request) -> RequestRun | None:
        """Return the stored run of a request; None if there is none."""
        return self._runs.get(request.key)

    def keep_run(self, request: Request, run: RequestRun) -> None:
        """Store the run of a request."""
        row = Row(rows.REQUEST, run.unit, request, run)
        found = rows.table([row], rows.metrics_in([row]))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, found.schema) as stream:
            stream.write_table(found)
        self._append(_RUN, sink.getvalue().to_pybytes())

    def comparison(self, block: str, request: Request) -> BlockComparison | None:
        """Return the stored cross-check of a block on a request; None if there is none."""
        return self._comparisons.get((block, request.key))

    def keep_comparison(self, block: str, found: BlockComparison) -> None:
        """Store the cross-check of a block on a request."""
        numbers = [found.measured.hex(), found.certified.hex()]
        self._append(_COMPARISON, json.dumps([block, found.request, *numbers]).encode())

    def note(self, name: str) -> bytes | None:
        """Return the note of this name; None if there is none."""
        return self._notes.get(name)

    def keep_note(self, name: str, content: bytes) -> None:
        """Store bytes under a name, which contains no NUL."""
        self._append(_NOTE, name.encode() + b"\0" + content)

    def take_over(self, done: int, of: int) -> None:
        """Report that `done` requests are resumed, and keep the bytes that were read as
        evidence."""
        self.resumed = self._read_bytes
        self.tell(f"resumed: {done} of {of} requests")
        self.notes = (
            f"resumed: {done} of {of} requests are of an earlier run, from its checkpoint",
        )

    def restart(self, key: str, why: str) -> None:
        """Discard the stored results, with a message why."""
        self.tell(f"not resumed: {why}")
        self._read_bytes = b""
        self._runs.clear()
        self._comparisons.clear()
        self._notes.clear()
        if self._file is not None:
            os.ftruncate(self._file, 0)
            self._begin(key)

    def close(self) -> None:
        """Close the file without a change."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def remove(self) -> None:
        """Remove the file, and the folder if it was made for it and is empty."""
        if self._file is None:
            return
        self.path.unlink(missing_ok=True)
        self.close()
        if self._made:
            with suppress(OSError):
                self.path.parent.rmdir()

    def _read(self, key: str) -> int:
        """Read the frames of the file; return the end of the last usable one, 0 for none."""
        assert self._file is not None
        end = 0
        with open(os.dup(self._file), "rb") as stream:
            stream.seek(0)
            data = b"" if self.fresh else stream.read()
        changed = False
        for kind, content, code, frame_end in _frames(data):
            if not hmac.compare_digest(code, sealed(self._code, kind, content)):
                changed = True
                break
            if end == 0:
                if kind != _KEY or content[:-_NONCE] != key.encode():
                    return 0
            elif kind == _RUN:
                self._take_run(content)
            elif kind == _COMPARISON:
                block, request, measured, certified = json.loads(content)
                values = (float.fromhex(measured), float.fromhex(certified))
                self._comparisons[block, request] = BlockComparison(request, *values)
            elif kind == _NOTE:
                name, _, note = content.partition(b"\0")
                self._notes[name.decode()] = note
            end, self._code = frame_end, code
        if changed:
            where = "it" if end == 0 else "what follows its first records"
            self.tell(f"{self.path}: {where} was changed, or not written here; it is not used")
        self._read_bytes = data[:end]
        return end

    def _take_run(self, content: bytes) -> None:
        found = pa.ipc.open_stream(content).read_all()
        names = found.schema.names
        metrics = [f.name for f in found.schema.field("metrics").type] if "metrics" in names else ()
        for row in rows.rows_of(found, list(metrics)):
            if row.run is not None:
                self._runs[row.unit.key] = row.run

    def _begin(self, key: str) -> None:
        self._code = b""
        self._append(_KEY, key.encode() + secrets.token_bytes(_NONCE))

    def _append(self, kind: bytes, content: bytes) -> None:
        if self._file is None:
            return
        self._code = sealed(self._code, kind, content)
        frame = _HEAD.pack(_MARK, kind, len(content), self._code) + content
        try:
            while frame:
                frame = frame[os.write(self._file, frame) :]
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> Exception:
        return refuse(
            codes.INPUT_OUTPUT,
            f"{self.path} cannot be written: {error.strerror}",
            help="free some space, or write to a folder on another disk with -o",
        )


def _frames(data: bytes) -> Iterator[tuple[bytes, bytes, bytes, int]]:
    """Yield kind, content, code and end of every complete frame before the first incomplete one."""
    at = 0
    while at + _HEAD.size <= len(data):
        mark, kind, length, code = _HEAD.unpack_from(data, at)
        start, end = at + _HEAD.size, at + _HEAD.size + length
        if mark != _MARK or end > len(data):
            return
        yield kind, data[start:end], code, end
        at = end


def _lock(file: int) -> bool:
    """Lock the file for this process until it ends; return whether the lock was free."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
