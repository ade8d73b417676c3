"""Defects planted in the checker, one by one: the tests must find each.

A mutant is the checker with one expression of one rule changed: a term dropped, a sign turned, a
radius halved, γ_n without its n, an inflation left out, the larger for the smaller, a refusal left
out. Which mutants a campaign tries is chosen by its seed, from all that the source gives. Each runs
in a process of its own, from changed text; the files stay as they are.

    make mutants                                   100 of campaign 1, recorded
    .venv/bin/python -m bench.mutants --count 20 --seed 7
    .venv/bin/python -m bench.mutants --within chain,rationals/    of some modules
    .venv/bin/python -m bench.mutants --only affine/rules/softmax.py:52:half
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from bench.common import RESULTS, Better, Figure, report

ROOT = Path(__file__).resolve().parents[1]
CHECKER = ROOT / "certs" / "kcdsl_certs" / "recheck"
COUNT, SEED, SECONDS = 100, 1, 300

# Modules of the rules, with the tests that know them best first.
# A module is of the first group that names it.
LENGTHS = ("sequences.py", "rules/sequence.py")
NEARBY = ("nearby.py", "rationals/nearby.py", "rules/parameters.py")
ROWS = ("affine/passes.py", "affine/ellipsoids.py", "affine/cases.py", "affine/spectrum.py")
CHAINS = (
    "chain.py", "chain_document.py", "joining.py", "affine/handing.py", "affine/drifting.py",
)  # fmt: skip
EXACT = ("exact.py", "rationals/*.py")
MOVED = ("norms.py",)
INTERVAL = (
    "rules/*.py", "box.py", "functionals.py", "formats.py", "weights.py", "propagate.py",
    "staircase.py", "matrix_units.py", "spec.py",
)  # fmt: skip
AFFINE = ("affine/*.py", "affine/rules/*.py")
DOCUMENT = (
    "check.py", "document.py", "block.py", "strict.py", "safetensors.py", "inexact.py", "room.py",
)  # fmt: skip
TESTS: dict[tuple[str, ...], tuple[str, ...]] = {
    LENGTHS: (
        "tests/unit/certs/test_recheck_any_length.py",
        "tests/unit/interval/test_sequences.py",
        "tests/property/test_any_length.py",
        "tests/property/test_any_length_blocks.py",
        "tests/unit/certs/test_proof_fields.py",
    ),
    NEARBY: (
        "tests/property/test_weights_region.py",
        "tests/unit/interval/test_neighbourhood.py",
        "tests/unit/certs/test_proof_fields.py",
    ),
    ROWS: (
        "tests/property/test_affine_ellipsoids.py",
        "tests/property/test_affine_cases.py",
        "tests/unit/certs/test_recheck_affine.py",
        "tests/property/test_affine_checker.py",
        "tests/property/test_affine_two_implementations.py",
        "tests/property/test_ball_runs.py",
        "tests/unit/certs/test_proof_fields.py",
    ),
    CHAINS: (
        "tests/unit/certs/test_recheck_handing.py",
        "tests/unit/certs/test_chain_documents.py",
        "tests/property/test_chained_links.py",
        "tests/unit/certifier/test_chaining.py",
    ),
    EXACT: (
        "tests/unit/certs/test_recheck_exact.py",
        "tests/unit/certs/test_recheck_weights.py",
        "tests/unit/certs/test_recheck_formats.py",
        "tests/unit/certs/test_recheck_box.py",
        "tests/unit/interval/test_quantisers.py",
        "tests/property/test_weights_region.py",
        "tests/property/test_chained_links.py",
    ),
    MOVED: ("tests/unit/cli/test_transfer.py",),
    INTERVAL: (
        "tests/property/test_ball_formulas.py",
        "tests/unit/certs/test_recheck_rules.py",
        "tests/unit/certs/test_recheck_document.py",
        "tests/unit/certs/test_recheck_formats.py",
        "tests/unit/certs/test_recheck_weights.py",
        "tests/unit/certs/test_recheck_exact.py",
        "tests/unit/certs/test_recheck_box.py",
        "tests/unit/interval/test_matrix_units.py",
        "tests/unit/interval/test_quantisers.py",
        "tests/property/test_accumulation.py",
        "tests/property/test_ball_references.py",
        "tests/property/test_recheck_soundness.py",
        "tests/property/test_ball_runs.py",
    ),
    AFFINE: (
        "tests/property/test_ball_references.py",
        "tests/unit/certs/test_recheck_affine.py",
        "tests/property/test_affine_checker.py",
        "tests/property/test_affine_remainders.py",
        "tests/property/test_affine_two_implementations.py",
        "tests/unit/certs/test_recheck_order.py",
        "tests/property/test_affine_orders.py",
        "tests/property/test_affine_ellipsoids.py",
        "tests/property/test_affine_cases.py",
        "tests/property/test_ball_runs.py",
    ),
    DOCUMENT: (
        "tests/unit/certs/test_recheck_document.py",
        "tests/unit/certs/test_hostile_proofs.py",
        "tests/unit/certs/test_recheck_safetensors.py",
        "tests/unit/certs/test_recheck_affine.py",
        "tests/unit/certs/test_proof_fields.py",
    ),
}
INFLATIONS = {"raised", "up", "above", "down", "lifted", "product_up"}
RADII = {
    "radius", "error", "reach", "cast", "own", "rest", "spread", "wide", "half", "carried", "wrong",
    "theta", "kappa", "slack", "lost", "element", "mean", "shrink", "chi", "along", "moved",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    """A changed module: where, what was done, and its text."""

    module: str
    line: int
    kind: str
    change: str
    source: str

    @property
    def name(self) -> str:
        """Return file, line and kind."""
        return f"{self.module}:{self.line}:{self.kind}"


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    module = _name(path)
    for at, node in enumerate(ast.walk(tree)):
        for kind, place, new in _changes(node):
            changed = copy.deepcopy(tree)
            target = next(n for k, n in enumerate(ast.walk(changed)) if k == at)
            before = ast.unparse(target)
            _put(target, place, new)
            source = ast.unparse(ast.fix_missing_locations(changed))
            line = getattr(node, "lineno", 0)
            after = ast.unparse(target)
            if source != ast.unparse(tree):
                yield Mutant(module, line, kind, f"{before[:90]} → {after[:90]}", source)


def _put(target: ast.AST, place: str, new: ast.AST) -> None:
    name, _, index = place.partition(".")
    if index:
        getattr(target, name)[int(index)] = new
    else:
        setattr(target, name, new)


def _changes(parent: ast.AST) -> Iterator[tuple[str, str, ast.AST]]:
    """Yield changes of what stands directly below a node: kind, field and its replacement."""
    for name, value in ast.iter_fields(parent):
        items = value if isinstance(value, list) else [value]
        for index, node in enumerate(items):
            place = f"{name}.{index}" if isinstance(value, list) else name
            if isinstance(node, ast.AST):
                yield from ((kind, place, new) for kind, new in _replacements(node))


def _replacements(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right) if _numbers(left, right):
            yield "drop", left
            yield "drop-left", right
        case ast.BinOp(left=left, op=ast.Sub(), right=right) if _numbers(left, right):
            yield "sign", ast.BinOp(left, ast.Add(), right)
        case ast.Call(func=ast.Name(id="gamma"), args=[_, u]):
            yield "gamma", ast.Call(ast.Name("gamma", ast.Load()), [ast.Constant(1), u], [])
        case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in INFLATIONS:
            yield "inflation", first
        case ast.Call(func=ast.Attribute(attr=name), args=[first, *_]) if name in INFLATIONS - {
            "product_up"
        }:
            yield "inflation", first
        case ast.Call(func=ast.Attribute(value=ast.Name(id="np"), attr=name), args=args) if (
            name in ("maximum", "minimum") and len(args) == 2
        ):
            other = "minimum" if name == "maximum" else "maximum"
            func = ast.Attribute(ast.Name("np", ast.Load()), other, ast.Load())
            yield "extreme", ast.Call(func, args, [])
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in RADII:
            half = ast.BinOp(value, ast.Mult(), ast.Constant(0.5))
            yield "half", ast.Assign(node.targets, half)
        case ast.If(test=test, body=[ast.Raise()], orelse=[]):
            yield "refusal", ast.If(ast.Constant(False), [ast.Expr(test)], [])


def _numbers(*nodes: ast.AST) -> bool:
    """Say whether an operation may be one of numbers, and not of texts, tuples or small counts."""
    return not any(
        isinstance(n, ast.Constant | ast.JoinedStr | ast.Tuple | ast.List) for n in nodes
    )


def files(patterns: Sequence[str]) -> list[Path]:
    """Return the modules of a group."""
    found = [path for pattern in patterns for path in sorted(CHECKER.glob(pattern))]
    return [path for path in found if path.name != "__init__.py"]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from changed text."""

    def __init__(self, mutant: Mutant) -> None:
        dotted = mutant.module.removesuffix(".py").replace("/", ".")
        self.name, self.mutant = f"kcdsl_certs.recheck.{dotted}", mutant

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_loader(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        exec(
            compile(self.mutant.source, str(CHECKER / self.mutant.module), "exec"), module.__dict__
        )


def outcome(mutant: Mutant | None, tests: Sequence[str]) -> str:
    """Return the first test that fails on a mutant, "time" for one that does not end, "" if none.

    None is the checker as it is.

    The process is a copy of this one, which has imported what takes long, but not the checker.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _run(mutant, tests, writing)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        found = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "time" if os.WTERMSIG(status) == signal.SIGALRM else "crash"
    return found


def _run(mutant: Mutant | None, tests: Sequence[str], writing: int) -> None:
    import pytest

    class Watch:
        failed = ""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            self.failed = self.failed or (report.nodeid if report.failed else "")

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            self.failed = self.failed or (report.nodeid if report.failed else "")

    if mutant is not None:
        signal.alarm(SECONDS)
        sys.meta_path.insert(0, _Finder(mutant))
    watch = Watch()
    with tempfile.TemporaryFile("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
        code = pytest.main([*options, *tests], plugins=[watch])
    name = watch.failed or ("" if code == pytest.ExitCode.OK else f"exit {code}")
    os.write(writing, name.encode())
    os._exit(0)


def chosen(
    count: int, seed: int, within: Sequence[str] = ("",)
) -> list[tuple[Mutant, tuple[str, ...]]]:
    """Return mutants of all modules: shares by the number that a module has, kinds mixed.

    `within` has what the names of modules begin with.
    """
    found = [
        (mutant, tests)
        for path, tests in _modules()
        if any(_name(path).startswith(start) for start in within)
        for mutant in mutants_of(path)
    ]
    random.Random(seed).shuffle(found)
    return found[:count]


def _modules() -> list[tuple[Path, tuple[str, ...]]]:
    """Return every module with the tests of its group, once."""
    found: dict[Path, tuple[str, ...]] = {}
    for group, tests in TESTS.items():
        for path in files(group):
            found.setdefault(path, tests)
    return list(found.items())


def _name(path: Path) -> str:
    return str(path.relative_to(CHECKER))


def main() -> int:
    """Try a campaign and print the mutants that no test finds."""
    options = _parser().parse_args()
    os.chdir(ROOT)
    for name in ("numpy", "torch", "pytest", "hypothesis", "flint", "ml_dtypes", "jsonschema"):
        importlib.import_module(name)
    pairs = chosen(options.count, options.seed, options.within.split(","))
    if options.only:
        everything = chosen(10**9, options.seed)
        pairs = [pair for pair in everything if pair[0].name == options.only]
    counts: Counter[str] = Counter()
    survived: list[Mutant] = []
    with multiprocessing.get_context("fork").Pool(options.jobs) as crew:
        plain = list(dict.fromkeys(tests for _, tests in pairs))
        for found in crew.imap(_outcome, [(None, tests) for tests in plain]):
            if found:
                print(f"error: {found} fails without any defect", file=sys.stderr)
                return 2
        found_by = crew.imap(_outcome, pairs)
        for number, ((mutant, _), found) in enumerate(zip(pairs, found_by, strict=True), 1):
            counts[mutant.kind] += 1
            if not found:
                survived.append(mutant)
            said = found or "SURVIVED: " + mutant.change
            print(f"{number:4} {mutant.name:44} {said}", flush=True)
    return report("mutants", _figures(counts, survived), _folder(options))


def _outcome(pair: tuple[Mutant | None, tuple[str, ...]]) -> str:
    return outcome(*pair)


def _folder(options: argparse.Namespace) -> Path:
    partly = options.only or options.within
    recorded = options.count >= COUNT and options.seed == SEED and not partly
    return RESULTS if recorded else Path(tempfile.mkdtemp())


def _figures(counts: Counter[str], survived: list[Mutant]) -> list[Figure]:
    kinds = Counter(mutant.kind for mutant in survived)
    total = sum(counts.values())
    killed: Callable[[str], int] = lambda kind: counts[kind] - kinds[kind]  # noqa: E731
    return [
        Figure("planted", total, Better.HIGHER),
        Figure("found", total - len(survived), Better.HIGHER),
        *(
            Figure(f"found of {kind}", killed(kind), Better.HIGHER, None, f"of {counts[kind]}")
            for kind in sorted(counts)
        ),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help="how many mutants")
    parser.add_argument("--seed", type=int, default=SEED, help="which are chosen")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--only", default="", help="the name of one mutant")
    parser.add_argument("--within", default="", help="what modules begin with, with commas between")
    return parser


if __name__ == "__main__":
    sys.exit(main())
