"""Running checks and features away from the loop that talks to the client.

Checks have a thread of their own, so that findings do not wait behind other questions. Requests
that wait can be cancelled; one whose work fails is answered emptily, and the failure is logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from kcdsl.lsp.checking import Checker
from kcdsl.lsp.documents import Document, Snapshot, Texts

Answer = TypeVar("Answer")


def _one_thread(name: str) -> Callable[[], ThreadPoolExecutor]:
    return lambda: ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)


@dataclass(slots=True)
class Work:
    """Two threads: one checks, one answers."""

    checker: Checker = field(default_factory=Checker)
    _checks: ThreadPoolExecutor = field(default_factory=_one_thread("check"))
    _answers: ThreadPoolExecutor = field(default_factory=_one_thread("answer"))

    async def snapshot(self, document: Document, texts: Texts) -> Snapshot:
        """Return what is known of a document."""
        return await self._run(self._checks, lambda: self.checker.snapshot(document, texts))

    async def answer(self, question: Callable[[], Answer]) -> Answer:
        """Return what a feature says."""
        return await self._run(self._answers, question)

    async def forget(self, uri: str | None = None) -> None:
        """Forget a document, or all of them."""
        await self._run(self._checks, lambda: self.checker.forget(uri))

    def close(self) -> None:
        """Let the threads end; what waits is dropped."""
        for pool in (self._checks, self._answers):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, pool: ThreadPoolExecutor, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(pool, work)
