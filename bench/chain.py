"""Blocks proved stage by stage and as one: bounds, attack, time, and cost after a training step.

MiniLM (real weights, one short sentence) under one free rounding to float32 at every operation, and
the tiny language model between torch eager and its flash kernel in float32, any order and any cast;
chains of boxes alone, with ellipsoids, and with fewer links, in the order of `kcdsl verify
--chain`. The whole block is one affine graph, and the attack is on the whole block. A chain is
looser, so the only limit is that no run exceeds it.

    make bench-chain
    python -m bench.chain tiny    # only cases of this name, results are not kept
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from bench import minilm, no_flip
from bench.common import Better, Figure, report

if TYPE_CHECKING:
    from kcdsl.route.goals import Goal
    from kcdsl_backends.certifier.statements.cases import Case as Region
    from kcdsl_backends.certifier.statements.problems import ProblemFactory
    from kcdsl_backends.certifier.worker import WorkerContext

SENTENCE = (101, 7592, 2088, 2003, 2204, 102)
"""[CLS] hello world is good [SEP]."""
PROMPT = 6
"""Tokens of the tiny language model's prompt."""
_EXACT = {"preset": "torch-eager", "compute": "float64", "accumulate": "float64"}
_OPERATIONS = ("context", "linear", "matmul", "add", "scale", "divide", "gelu", "layer_norm")
_FREE = {
    **_EXACT,
    "results": dict.fromkeys(_OPERATIONS, "float32"),
    "attention": {"scores": "float32", "probabilities": "float32"},
}
_FLASH = {"preset": "torch-sdpa-flash", "compute": "float32"}


@dataclass(frozen=True, slots=True)
class Line:
    """One block on one region; a plan is a number of links and whether they have ellipsoids."""

    name: str
    model: str
    block: str
    plans: tuple[tuple[int, bool], ...] = ((2, False), (2, True))
    radius: float = 0.0


LINES = (
    Line("MiniLM layer_0, point", "minilm", "layer_0"),
    Line("MiniLM model, point", "minilm", "model", ((7, False), (7, True), (4, True), (2, True))),
    Line("tiny LM layer_1, point", "tiny", "layer_1"),
    Line("tiny LM layer_1, ball 1e-4", "tiny", "layer_1", radius=1e-4),
    Line("tiny LM model, point", "tiny", "model", ((4, False), (4, True), (2, True))),
)


def main() -> int:
    """Measure and report every line; or measure and print those with `only` in their name."""
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    figures: list[Figure] = []
    for line in LINES:
        if only in line.name:
            figures += shown(measured(line))
    if not only or "step" in only:
        figures += shown(after_a_step())
    return 0 if only else report("chain", figures)


def shown(figures: list[Figure]) -> list[Figure]:
    """Print figures and return them."""
    for figure in figures:
        print(f"  {figure.name}: {figure.value:.4g}  {figure.conditions}", flush=True)
    return figures


def measured(line: Line) -> list[Figure]:
    """Return the figures of one line."""
    from kcdsl_backends.attack import attack
    from kcdsl_backends.certifier.composition import CompositionTask, StagePlan
    from kcdsl_backends.certifier.statements.problems import claim_margin
    from kcdsl_backends.drift.functionals import functional_bound

    factory, tokens = _factory_of(line.model)
    context, goal, region = _inputs(factory, line.block, tokens, line.radius)
    problem = factory.problem(line.block, tokens)
    started = time.perf_counter()
    forms = problem.forms(region.centre, region.radius)
    margin = claim_margin(factory.train, factory.infer)
    whole = margin * functional_bound(forms, forms.box(), "inf", lambda value: False)
    seconds = time.perf_counter() - started
    train, infer = problem.simulators()
    run = attack(train, infer, "inf", region.centre, region.radius, seed=region.seed).value
    if not 0 < run <= whole:
        raise SystemExit(f"{line.name}: a run attains {run}, the bound is {whole}")
    where = f"{whole:.3e} / {run:.3e}; {len(tokens)} tokens"
    figures = [
        Figure(f"{line.name}: whole, seconds", seconds, Better.LOWER),
        Figure(f"{line.name}: whole / attack", whole / run, Better.LOWER, None, where),
    ]
    for count, ellipsoids in line.plans:
        started = time.perf_counter()
        plan = StagePlan(count, ellipsoids)
        outcome = CompositionTask(goal, region, plan).run(context)[0].bounded.outcome
        seconds = time.perf_counter() - started
        if outcome.bound < run:
            raise SystemExit(f"{line.name}: a run attains {run}, the bound is {outcome.bound}")
        known = [link for link in outcome.links if math.isfinite(link.bound)]
        bounds = ", ".join(f"{link.name} {link.bound:.2e}" for link in outcome.links)
        named = f"{line.name}: chain of {count}" + (" with ellipsoids" if ellipsoids else "")
        figures.append(Figure(f"{named}, seconds", seconds, Better.LOWER))
        figures.append(
            Figure(f"{named}: links with a bound", len(known), Better.HIGHER, None, bounds)
        )
        if math.isfinite(outcome.bound):
            figures.append(
                Figure(f"{named} / attack", outcome.bound / run, Better.LOWER, None, bounds)
            )
    return figures


def after_a_step() -> list[Figure]:
    """Return cached links and seconds of a second proof of the tiny model's layer, after a change
    of its second half and after a small one of its first half."""
    from kcdsl_backends.certifier.composition import CompositionTask, StagePlan

    figures = []
    prompt = no_flip.prompts(1)[0][:PROMPT]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for what, key, by in (
            ("at first", "", 0.0),
            ("after a step of the MLP by 1e-2", "mlp.up_proj", 1e-2),
            ("after a step of the attention by 1e-6", "self_attn.o_proj", 1e-6),
        ):
            factory = _stepped(folder, key, by)
            context, goal, region = _inputs(factory, "layer_1", prompt, 1e-3, folder / "cache")
            started = time.perf_counter()
            outcome = (
                CompositionTask(goal, region, StagePlan(2, ellipsoids=False))
                .run(context)[0]
                .bounded.outcome
            )
            seconds = time.perf_counter() - started
            known = ", ".join(link.name for link in outcome.links if link.cached) or "none"
            named = f"tiny LM layer_1, ball 1e-3, {what}: chain, seconds"
            figures.append(Figure(named, seconds, Better.LOWER, None, f"known: {known}"))
    return figures


def _factory_of(model: str) -> tuple[ProblemFactory, tuple[int, ...]]:
    if model == "minilm":
        return minilm.problem_factory(_FREE, _EXACT), SENTENCE
    return no_flip.problem_factory(_FLASH), no_flip.prompts(1)[0][:PROMPT]


def _stepped(folder: Path, key: str, by: float) -> ProblemFactory:
    """Return the tiny model with one tensor scaled by 1 + `by`; repeated steps accumulate."""
    import torch
    from safetensors.torch import load_file, save_file

    from kcdsl.ir.terms import ModelRef
    from kcdsl.model.loader import load_model
    from kcdsl.model.presets import resolve
    from kcdsl_backends.certifier.statements.problems import ProblemFactory

    path = folder / "model.safetensors"
    state = load_file(path if path.is_file() else no_flip.EXAMPLE / "model.safetensors")
    for name in state:
        if key and key in name and ".1." in name:
            state[name] = state[name] * (1 + by)
    save_file(state, path)
    (folder / "config.json").write_bytes((no_flip.EXAMPLE / "config.json").read_bytes())
    files = ModelRef("model.safetensors", architecture="llama", config="config.json")
    train = resolve({"preset": "torch-eager", "compute": "float32"})
    return ProblemFactory(load_model(files, folder), train, resolve(_FLASH), torch.device("cpu"))


def _inputs(
    factory: ProblemFactory,
    block: str,
    tokens: tuple[int, ...],
    radius: float,
    cache: Path | None = None,
) -> tuple[WorkerContext, Goal, Region]:
    """Return the inputs of a chain: a context, a goal that no bound meets, and a case."""
    import torch

    from kcdsl.check.compile import load_contract
    from kcdsl.route.goals import goals
    from kcdsl_backends.certifier.cache import rules_version
    from kcdsl_backends.certifier.statements.cases import Case as Region
    from kcdsl_backends.certifier.worker import RunSettings, WorkerContext

    program, _ = load_contract(no_flip.EXAMPLE / "contract.yaml")
    goal = next(goal for goal in goals(program) if goal.functional == "inf")
    goal = replace(goal, block=block, threshold=Fraction(1, 10**30))
    sha256 = factory.model.checkpoint.sha256
    setting = RunSettings(program, no_flip.EXAMPLE, "cpu", 2, sha256, rules_version(), cache)
    spread = torch.full((1, 1), radius, dtype=torch.float64)
    return (
        WorkerContext(setting, factory),
        goal,
        Region(block, tokens, factory.centre(block, tokens), spread),
    )


if __name__ == "__main__":
    sys.exit(main())
