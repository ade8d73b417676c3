"""Commands and time from the wheel to the first signed certificate.

The model is a folder written by transformers outside the repository; the commands are those of
docs/tutorials/first-certificate.md. The dependencies of kcdsl are already installed.

    python -m bench.first_hour --only road
"""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path

from bench.common import Better, Figure
from tests.support.installed import build, first_certificate, install
from tests.support.small_models import save_llama

REPOSITORY = Path(__file__).resolve().parents[1]
MOST_COMMANDS = 4


def figures() -> list[Figure]:
    """Run all commands once."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "dist").mkdir()
        wheel = build(REPOSITORY, "wheel", folder / "dist")
        save_llama(folder / "model")
        began, before = time.perf_counter(), _processor()
        place = install(wheel, folder / "env")
        ran = first_certificate(place, folder, "model")
        whole, used = time.perf_counter() - began, _processor() - before
    accepted = float(all(one.code == 0 for one, _ in ran))
    lower, words = Better.LOWER, "init, keygen, verify --sign, check; a Llama of 35,000 parameters"
    slowest = max(seconds for _, seconds in ran)
    return [
        Figure("commands to a signed certificate", len(ran), lower, MOST_COMMANDS, words),
        Figure("the certificate is accepted", accepted, Better.HIGHER, 1.0, words),
        Figure("minutes from the wheel to it", whole / 60, lower, 10.0, "pip install included"),
        Figure("processor minutes from the wheel to it", used / 60, lower, None, "the same"),
        Figure("seconds of the slowest command", slowest, lower, None, words),
    ]


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
