"""Ask a backend goals with known answers, and compare its bounds with runs on random blocks."""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kcdsl.check.compile import load_program
from kcdsl.diagnostics import Refusal
from kcdsl.route.goals import goals
from kcdsl.verdict.model import Held, Inconclusive, InvalidEvidence, Violated, verdict_name
from kcdsl.verdict.outcome import GoalOutcome
from kcdsl_backends.certifier.backend import BACKEND as CERTIFIER
from kcdsl_backends.conformance import network
from kcdsl_backends.conformance.goals import BFLOAT16, FLOAT16, FLOAT32, FREE, LADDER, KnownAnswer
from kcdsl_backends.conformance.goals import KnownGoal as KnownGoal

NUMERICS: tuple[Mapping[str, Any], ...] = (
    FLOAT32, BFLOAT16, FREE, FLOAT16,
    {"preset": "torch-eager", "casts": "any"},
    {"preset": "torch-sdpa-flash", "compute": "bfloat16"},
    {"preset": "fp8-w8a8-per-channel"},
    {"preset": "int8-weights"},
)  # fmt: skip
"""Numerics from which each random goal draws two."""
_SLACK = 1 + 2.0**-30
"""Factor for the rounding errors of bounds of two domains."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict of a backend on a goal; `wrong` states the error, empty if there is none."""

    goal: str
    verdict: str
    wrong: str = ""
    reason: str = ""


def judged(goal: KnownGoal, answer: GoalOutcome | Exception) -> Judgement:
    """Compare an answer with the known one."""
    if isinstance(answer, Exception):
        return _refused(goal.name, answer)
    name, wrong, reason = verdict_name(answer.verdict), "", ""
    match answer.verdict:
        case Inconclusive(reason) | InvalidEvidence(reason):
            wrong = "" if reason.strip() else "it is open without a reason"
        case Held() if goal.answer is not KnownAnswer.TRUE:
            wrong = f"the answer is {goal.answer}: {goal.because}"
        case Violated() if goal.answer is KnownAnswer.TRUE:
            wrong = f"the answer is held: {goal.because}"
        case Held() if not math.isfinite(answer.bound):
            wrong = "it is held without a finite bound"
    if not wrong and answer.cases and answer.bound < goal.least:
        wrong = f"its bound {answer.bound!r} is below {goal.least!r}, which a run attains"
    return Judgement(goal.name, name, wrong, reason)


def _refused(goal: str, error: Exception) -> Judgement:
    """Judge an exception: a Refusal declines a goal, any other exception is a defect."""
    if isinstance(error, Refusal):
        return Judgement(goal, "refused", reason=str(error.diagnostics[0].message))
    return Judgement(goal, "raised", f"{type(error).__name__}: {error}")


def answered(backend: Any, goal: KnownGoal, evidence: str = "proof") -> GoalOutcome | Exception:
    """Return the answer of a backend to a goal, or the exception that it raised."""
    with tempfile.TemporaryDirectory(prefix="kcdsl-") as folder:
        config = {
            "vocab_size": len(goal.rows),
            "width": len(goal.rows[0]),
            "steps": goal.steps,
        }
        state = {name: torch.zeros_like(p) for name, p in network.build(config).named_parameters()}
        state["embedding.weight"] = torch.tensor(goal.rows)
        state.update(goal.parameters)
        clauses = [goal.require]
        try:
            (found,) = _answers(backend, Path(folder), config, state, goal, clauses, evidence)
        except Exception as error:
            return error
        return found


def _answers(
    backend: Any,
    folder: Path,
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    goal: KnownGoal,
    clauses: Sequence[str],
    evidence: str,
    **changes: Any,
) -> tuple[GoalOutcome, ...]:
    """Write a contract with these clauses and return the answers of a backend."""
    save_file(dict(state), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    tokens = list(range(config["vocab_size"]))
    (folder / "rows.jsonl").write_text(json.dumps({"id": "a", "tokens": tokens}) + "\n")
    model = {"checkpoint": "model.safetensors", "config": "config.json"}
    contract = {
        "kcdsl": 1,
        "contract": "known",
        "version": "1.0.0",
        "model": {**model, "module": f"{network.__name__}:build"},
        "kernels": {
            "train": {"run": "torch.eager", "numerics": goal.train},
            "infer": {"run": "torch.eager", "numerics": goal.infer},
        },
        "data": "rows.jsonl",
        "slices": {"all": {"where": goal.where} if goal.where else {}},
        "clauses": {
            f"K-{number}": {"require": text, "level": "L2", "evidence": evidence}
            for number, text in enumerate(clauses)
        },
    }
    (folder / "contract.yaml").write_text(json.dumps(contract))
    program = load_program(folder / "contract.yaml")
    wanted = [replace(found, **changes) for found in goals(program)]
    return tuple(backend.decide(program, folder, wanted, device="cpu", attacks=True))


def monotone(backend: Any, evidence: str = "proof") -> Judgement:
    """Decide one drift with rising limits: after a limit that holds, none may be violated."""
    rows = ((0.3, -1.2), (0.7, 0.1))
    config = {"vocab_size": 2, "width": 2, "steps": ["linear", "relu", "linear"]}
    state = network.drawn(config, 7, 0.8)
    goal = KnownGoal("rising limits", ("linear", "relu", "linear"), rows, "", KnownAnswer.OPEN, "")
    texts = [
        f"forall x in ball(all, 0.01): norm_inf(drift(mlp_0, x)) <= {limit!r}" for limit in LADDER
    ]
    with tempfile.TemporaryDirectory(prefix="kcdsl-") as folder:
        try:
            found = _answers(backend, Path(folder), config, state, goal, texts, evidence)
        except Exception as error:
            return _refused(goal.name, error)
    names = [verdict_name(answer.verdict) for answer in found]
    held = [k for k, name in enumerate(names) if name == "held"]
    broken = [k for k, name in enumerate(names) if name == "violated"]
    wrong = ""
    if held and broken and max(broken) > min(held):
        wrong = f"{LADDER[min(held)]} holds and {LADDER[max(broken)]} does not"
    return Judgement(goal.name, f"{len(held)} held, {len(broken)} violated", wrong)


@dataclass(frozen=True, slots=True)
class RandomGoal:
    """A random block with its region, and the attack and bounds of its drift."""

    seed: int
    steps: tuple[str, ...]
    radius: float
    attack: float
    bounds: Mapping[str, float]

    @property
    def wrong(self) -> str:
        """Return which bound is below the run or above that of a coarser domain; empty if none."""
        for name, bound in self.bounds.items():
            if bound < self.attack:
                return f"{name}: the bound {bound!r} is below the run {self.attack!r}"
        coarse, all_domains = self.bounds["interval alone"], self.bounds["interval"]
        if all_domains > coarse * _SLACK:
            return f"all domains bound {all_domains!r}, intervals alone {coarse!r}"
        return ""


def campaign(
    backends: Mapping[str, Any], count: int, seed: int, evidence: str = "proof-real"
) -> Iterator[RandomGoal]:
    """Yield random goals with the strongest run and the bound of every backend, infinite if it
    declines."""
    for number in range(seed, seed + count):
        draw = random.Random(number)
        steps = tuple(draw.choice(network.STEPS) for _ in range(draw.randint(1, 3)))
        config = {"vocab_size": 3, "width": 4, "steps": steps}
        state = network.drawn(config, number, draw.choice((0.1, 0.5, 2.0)))
        radius = draw.choice((0.0, 1e-3, 0.1))
        region = f"ball(all, {radius})" if radius else "points(all)"
        train, infer = draw.sample(NUMERICS, 2)
        text = f"forall x in {region}: norm_inf(drift(mlp_0, x)) <= 1000000000"
        goal = KnownGoal(
            f"random {number}", steps, [], text, KnownAnswer.OPEN, "", train=train, infer=infer
        )

        def bound(backend: Any, goal: KnownGoal = goal, **more: Any) -> GoalOutcome | None:
            with tempfile.TemporaryDirectory(prefix="kcdsl-") as folder:
                try:
                    (found,) = _answers(
                        *(backend, Path(folder), config, state, goal, [goal.require], evidence),  # noqa: B023
                        **more,
                    )
                except Refusal:
                    return None
                return found

        ours, coarse = bound(CERTIFIER), bound(CERTIFIER, domains=("interval",))
        attacks = [o.attack for o in (ours, coarse) if o is not None and o.attack is not None]
        found = {"interval": _bound(ours), "interval alone": _bound(coarse)}
        for name, backend in backends.items():
            if name != "interval":
                found[name] = _bound(bound(backend))
        yield RandomGoal(number, steps, radius, max(attacks, default=0.0), found)


def _bound(outcome: GoalOutcome | None) -> float:
    return math.inf if outcome is None or not outcome.cases else outcome.bound
