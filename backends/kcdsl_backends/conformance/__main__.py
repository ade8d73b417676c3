"""Run all conformance goals on a backend: `python -m kcdsl_backends.conformance NAME`."""

from __future__ import annotations

import argparse
import sys

from kcdsl.api.backends import formal_backend
from kcdsl.diagnostics import Refusal
from kcdsl_backends.conformance.campaign import answered, campaign, judged, monotone
from kcdsl_backends.conformance.goals import known_goals


def main(words: list[str] | None = None) -> int:
    """Print every answer; return 0 if none is wrong, 1 if one is, 2 if there is no such backend."""
    parser = argparse.ArgumentParser(prog="python -m kcdsl_backends.conformance")
    parser.add_argument("backend", help="the name of the backend in the catalogue")
    parser.add_argument(
        "--evidence", default="proof", help="the evidence that clauses demand, such as proof-real"
    )
    parser.add_argument(
        "--random", type=int, default=0, metavar="N", help="number of random blocks"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the random blocks")
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit for one answer")
    options = parser.parse_args(words)
    try:
        backend = formal_backend(options.backend, seconds=options.seconds)
    except Refusal as refusal:
        print(f"error: {refusal.diagnostics[0].message}", file=sys.stderr)
        return 2
    wrong = 0
    judgements = (judged(goal, answered(backend, goal, options.evidence)) for goal in known_goals())
    for each in (*judgements, monotone(backend, options.evidence)):
        wrong += bool(each.wrong)
        sign = "✗" if each.wrong else "✓"
        note = each.wrong or each.reason
        print(f"{sign} {each.goal}: {each.verdict}" + (f" ({note})" if note else ""), flush=True)
    for one in campaign({options.backend: backend}, options.random, options.seed):
        wrong += bool(one.wrong)
        sign, bound = "✗" if one.wrong else "✓", one.bounds[options.backend]
        note = one.wrong or f"bound {bound:.3g}, run {one.attack:.3g}"
        print(f"{sign} random {one.seed}, {' '.join(one.steps)}: {note}", flush=True)
    print(f"{wrong} wrong answers" if wrong else "no wrong answer")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
