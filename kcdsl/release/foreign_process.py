"""Run a backend of another distribution in a separate process.

`python -m kcdsl.release.foreign_process` reads the question from a file that
`kcdsl.release.foreign` wrote, runs the backend, and writes the answer as JSON without floats.
Output of the backend goes to stderr.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def main(question: str, answer: str) -> None:
    """Run the backend of the question; an exception is written as an answer."""
    asked = pickle.loads(Path(question).read_bytes())
    os.dup2(2, 1)
    try:
        module, _, attribute = asked["target"].partition(":")
        backend = getattr(import_module(module), attribute)
        found = backend.decide(asked["program"], asked["base"], asked["goals"], **asked["wishes"])
        document: dict[str, Any] = {"outcomes": [_told(one, asked["goals"]) for one in found]}
    except BaseException as error:
        document = {"error": f"{type(error).__name__}: {error}"}
    Path(answer).write_text(json.dumps(document, allow_nan=False), encoding="utf-8")


def _told(outcome: Any, goals: tuple[Any, ...]) -> dict[str, Any]:
    """Return an outcome as plain data; `goal` is its index in the question, or -1."""
    verdict, evidence = outcome.verdict, outcome.evidence
    shown = getattr(verdict, "counterexample", None)
    return {
        "goal": goals.index(outcome.goal) if outcome.goal in goals else -1,
        "verdict": type(verdict).__name__,
        "reason": str(getattr(verdict, "reason", "")),
        "counterexample": None if shown is None else {k: str(v) for k, v in shown.items()},
        "evidence": str(getattr(evidence.kind, "value", evidence.kind)),
        "assumptions": [str(text) for text in evidence.assumptions],
        "cases": [
            {
                "name": str(case.name),
                "length": int(case.length),
                "bound": float(case.bound).hex(),
                "attack": None if case.attack is None else float(case.attack).hex(),
                "reason": None if case.reason is None else str(case.reason),
                "stable": None if case.stable is None else bool(case.stable),
                "margin": None if case.margin is None else float(case.margin).hex(),
            }
            for case in outcome.cases
        ],
        "proof": _text(outcome.proof),
        "run": _text(outcome.counterexample),
        "notes": [str(text) for text in outcome.notes],
    }


def _text(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode("ascii")


if __name__ == "__main__":
    main(*sys.argv[1:])
