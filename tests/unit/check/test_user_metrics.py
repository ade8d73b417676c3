"""User-declared metrics: read from source text, typed as built-in ones, never imported."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from fractions import Fraction
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from kcdsl.check.expressions.names import is_reserved
from kcdsl.check.stored import load_bytes
from kcdsl.check.user_metrics import declarations, read_registry
from kcdsl.diagnostics import Sink
from kcdsl.diagnostics.model import Diagnostic, Refusal
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir import terms as ir
from kcdsl.ir.canonical import digest, document
from kcdsl.metrics import registry_of
from kcdsl.metrics.declarations import read_declarations
from kcdsl.source.modules import find_module
from tests.support.compiling import compile_contract

CONTRACT = """kcdsl: 1
contract: c
version: 1
model: {checkpoint: m, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
slices: {all: {}}
clauses:
"""
HEAD = "from kcdsl import metric\n\n"
GOOD = """@metric(
    family="numerical",
    unit="nats",
    better="lower",
    counted="token",
    needs=["logits"],
)
def gap(train_logits, infer_logits):
    \"\"\"How far apart they are.\"\"\"
    raise RuntimeError("run")
"""


def needing(needs: str) -> str:
    """Return a module whose metric has these needs."""
    return HEAD + GOOD.replace('["logits"]', needs)


Project = Callable[..., Path]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Return a function that writes a folder with a contract and a module of metrics."""

    def write(clauses: str, module: str = HEAD + GOOD, config: str | None = None) -> Path:
        (tmp_path / "own.py").write_text(module, encoding="utf-8")
        text = 'metrics = ["own.py"]\n' if config is None else config
        (tmp_path / "kcdsl.toml").write_text(text, encoding="utf-8")
        path = tmp_path / "contract.kc.yaml"
        path.write_text(f"{CONTRACT}  A: {{{clauses}, level: L1}}\n", encoding="utf-8")
        return path

    return write


def compiled(path: Path) -> ir.Program:
    program, sink = compile_contract(path)
    assert program is not None, [d.message for d in sink]
    return program


def errors(path: Path) -> list[Diagnostic]:
    return [d for d in compile_contract(path)[1] if d.severity == "error"]


def marked(diagnostic: Diagnostic) -> str:
    assert diagnostic.source is not None
    assert diagnostic.span is not None
    return diagnostic.source.text[diagnostic.span.start : diagnostic.span.end]


# --- in contracts --------------------------------------------------------------------------------


def test_both_forms_accept_the_metric(project: Project) -> None:
    first = compiled(project("require: p99(gap) <= 0.1 nats"))
    second = compiled(project("metric: p99_gap, threshold: 0.1"))
    assert digest(first) == digest(second)
    (metric,) = first.metrics
    assert (metric.name, metric.function, metric.counted) == ("gap", "own.py:gap", "token")
    assert (metric.unit, metric.dimension, metric.lower) == ("nats", "nat", Fraction(0))
    assert first.clauses[0].family is ir.Family.NUMERICAL


@pytest.mark.parametrize(
    ("clause", "code"),
    [
        ("require: gap <= 1", "KC505"),
        ("require: rate(gap) <= 1", "KC505"),
        ("require: p99(gap) >= 0.1", "KC213"),
        ("require: p1(gap) <= 0.1", "KC507"),
        ("require: p99(gap) <= 3 ms", "KC301"),
        ("require: p99(gap) <= -1", "KC404"),
        ("require: p99(gaps) <= 1", "KC203"),
        ("metric: p99_gap, threshold: 3 ms", "KC301"),
        ("require: mean(gap * latency) <= 1", "KC207"),
        ("family: runtime, require: mean(gap) <= 1", "KC214"),
        ("evidence: proof, require: mean(gap) <= 1", "KC403"),
        ("require: p99(gap) <= 1, budget: 1% of requests", "KC501"),
        ("require: forall gap in points(all): no_flip(model, gap)", "KC211"),
    ],
)
def test_user_metric_is_typed_as_built_in_ones(project: Project, clause: str, code: str) -> None:
    found = compile_contract(project(clause))[1]
    assert [d.code.id for d in found if d.severity != "note"] == [code]


def test_suggestion_names_the_metric(project: Project) -> None:
    (found,) = errors(project("require: p99(gapp) <= 1"))
    assert found.help == "did you mean `gap`?"


def test_declaration_reports_all_its_errors(project: Project) -> None:
    module = HEAD + GOOD.replace('"numerical"', '"numeric"').replace('"lower"', '"less", size=1')
    module = module.replace("infer_logits", "infer_logit")
    found = errors(project("require: p99(kl) <= 1", module))
    assert [marked(d) for d in found] == ['"numeric"', '"less"', "size=1", "infer_logit"]


def test_signed_metrics_need_a_magnitude(project: Project) -> None:
    module = HEAD + GOOD.replace('needs=["logits"],', 'needs=["logits"], signed=True,')
    assert [d.code.id for d in errors(project("require: mean(gap) <= 1", module))] == ["KC506"]
    (metric,) = compiled(project("require: mean(abs(gap)) <= 1", module)).metrics
    assert (metric.signed, metric.lower) == (True, None)


def test_code_of_the_user_is_not_run(project: Project, tmp_path: Path) -> None:
    module = HEAD + "raise SystemExit('run')\n" + GOOD
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("raise SystemExit('run')\n")
    (tmp_path / "pack" / "inner.py").write_text(module)
    before = set(sys.modules)
    compiled(project("require: mean(gap) <= 1", module, 'metrics = ["own.py"]'))
    compiled(project("require: mean(gap) <= 1", module, 'metrics = ["pack.inner"]'))
    assert {"own", "pack", "pack.inner"} & (set(sys.modules) - before) == set()


def test_unused_metrics_are_not_in_the_digest(project: Project) -> None:
    with_one = compiled(project("require: mean(kl) <= 1"))
    without = compiled(project("require: mean(kl) <= 1", config=""))
    assert with_one.metrics == ()
    assert digest(with_one) == digest(without)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('family="numerical"', 'family="statistical"'),
        ('unit="nats"', 'unit="1"'),
        ('better="lower"', 'better="lower", upper=3'),
        ('better="lower"', 'better="lower", lower=None'),
        ('better="lower"', 'better="lower", statistics=["mean"]'),
        ('counted="token"', 'counted="request"'),
        ('needs=["logits"]', 'needs=["logits", "tokens"]'),
    ],
)
def test_declaration_is_in_the_digest(project: Project, old: str, new: str) -> None:
    first = digest(compiled(project("require: mean(gap) <= 1")))
    module = HEAD + GOOD.replace(old, new)
    if "tokens" in new:
        module = module.replace("infer_logits):", "infer_logits, tokens):")
    second = digest(compiled(project("require: mean(gap) <= 1", module)))
    assert first != second
    again = module.replace('"""How far', '"""Far').replace("raise", "return 1  # no\n    raise")
    assert digest(compiled(project("require: mean(gap) <= 1", again))) == second


def test_stored_programs_load_without_the_module(project: Project, tmp_path: Path) -> None:
    program = compiled(project("require: p99(gap) <= 0.1"))
    stored = document(program)
    (tmp_path / "own.py").unlink()
    again = load_bytes(stored)
    assert again.metrics == program.metrics
    definition = registry_of(again)["gap"]
    assert (definition.better, definition.kind) == ("lower", "pointwise")
    damaged = stored.replace(b'"name":"gap"', b'"name":"pag"')
    with pytest.raises(Refusal, match="digest"):
        load_bytes(damaged)
    without = {k: v for k, v in json.loads(stored).items() if k not in ("metrics", "digest")}
    with pytest.raises(Refusal, match="not declared"):
        load_bytes(json.dumps(without).encode())


@pytest.mark.parametrize(
    "change", [{"name": "kl"}, {"unit": "ms"}, {"dimension": "s"}, {"unit": "furlong"}]
)
def test_invalid_stored_metrics_are_refused(project: Project, change: dict[str, str]) -> None:
    stored = json.loads(document(compiled(project("require: p99(gap) <= 0.1"))))
    del stored["digest"]
    stored["metrics"][0].update(change)
    with pytest.raises(Refusal, match="ir/1"):
        load_bytes(json.dumps(stored).encode())


# --- declarations --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "code", "at"),
    [
        (HEAD + GOOD.replace('"nats"', "UNIT"), "KC218", "UNIT"),
        (HEAD + GOOD.replace('"nats"', '"nat" + "s"'), "KC218", '"nat" + "s"'),
        (HEAD + GOOD.replace('"nats"', '"furlong"'), "KC218", '"furlong"'),
        (HEAD + GOOD.replace('"nats"', "3"), "KC218", "3"),
        (HEAD + GOOD.replace('"token"', '"window"'), "KC218", '"window"'),
        (HEAD + GOOD.replace('"lower"', '"less"'), "KC218", '"less"'),
        (HEAD + GOOD.replace('"numerical"', '"N"'), "KC218", '"N"'),
        (HEAD + GOOD.replace('["logits"]', "[]"), "KC218", "[]"),
        (needing('["logits", "logits"]'), "KC218", '["logits", "logits"]'),
        (HEAD + GOOD.replace('["logits"]', '["rewards"]'), "KC218", '["rewards"]'),
        (needing('["logits", "hidden"]'), "KC218", '["logits", "hidden"]'),
        (HEAD + GOOD.replace("needs=", "wants=[], needs="), "KC218", "wants=[]"),
        (HEAD + GOOD.replace("    needs=[\"logits\"],\n", ""), "KC218", "metric"),
        (HEAD + GOOD.replace("needs=", "signed=1, needs="), "KC218", "1"),
        (HEAD + GOOD.replace("needs=", "upper=True, needs="), "KC218", "True"),
        (HEAD + GOOD.replace("needs=", "upper=1e999, needs="), "KC218", "1e999"),
        (HEAD + GOOD.replace("needs=", f"upper=0x{9**5000:x}, needs="), "KC218", f"0x{9**5000:x}"),
        (HEAD + GOOD.replace("needs=", "upper=-1, needs="), "KC218", "-1"),
        (HEAD + GOOD.replace("needs=", "**more, needs="), "KC218", "more"),
        (HEAD + GOOD.replace("@metric(", "@metric('gap',"), "KC218", "'gap'"),
        (HEAD + GOOD.replace("needs=", 'statistics=["p99"], needs='), "KC218", '["p99"]'),
        (HEAD + GOOD.replace("needs=", 'name="a b", needs='), "KC218", '"a b"'),
        (HEAD + GOOD.replace("infer_logits)", "infer_logits, seed)"), "KC218", "seed"),
        (HEAD + GOOD.replace("infer_logits)", "infer_logits, tokens)"), "KC218", "tokens"),
        (HEAD + GOOD.replace("infer_logits)", "infer_logits=None)"), "KC218", "None"),
        (HEAD + GOOD.replace("infer_logits)", "*infer_logits)"), "KC218", "infer_logits"),
        (HEAD + GOOD.replace("infer_logits)", "**infer_logits)"), "KC218", "infer_logits"),
        (HEAD + GOOD.replace("def gap", "async def gap"), "KC218", None),
        (HEAD + "class C:\n" + "".join(f"    {x}\n" for x in GOOD.splitlines()), "KC218", None),
        (HEAD + "@metric\ndef gap(train_logits): ...\n", "KC218", "metric"),
        (HEAD + "gap = metric(family='numerical')(print)\n", "KC218", "metric(family='numerical')"),
        (HEAD + "def gap(:\n", "KC218", ":"),
        ("\0", "KC218", None),
        (HEAD + GOOD.replace("def gap", "def kl"), "KC219", "kl"),
        (HEAD + GOOD.replace("def gap", "def mean"), "KC219", "mean"),
        (HEAD + GOOD.replace("def gap", "def attn_0"), "KC219", "attn_0"),
        (HEAD + GOOD.replace("def gap", "def mean_gap"), "KC219", "mean_gap"),
        (HEAD + GOOD.replace("def gap", "def p99"), "KC219", "p99"),
        (HEAD + GOOD.replace("needs=", 'name="head", needs='), "KC219", '"head"'),
        (HEAD + GOOD.replace("def gap", "def top10_overlap"), "KC219", "top10_overlap"),
        (HEAD + GOOD + "\n" + GOOD, "KC218", None),
        (HEAD + GOOD + "\n" + GOOD.replace("def gap", "def g").replace("(\n", "(name='gap',\n", 1),
         "KC219", "'gap'"),
    ],
)  # fmt: skip
def test_unreadable_declarations_are_reported(module: str, code: str, at: str | None) -> None:
    sink = Sink()
    assert len(read_declarations(SourceFile("own.py", module), "own.py", sink, is_reserved)) <= 1
    (found,) = sink
    assert found.code.id == code, found.message
    if at is not None:
        assert marked(found) == at


@pytest.mark.parametrize(
    "head",
    [
        "from kcdsl import metric\n",
        "from kcdsl import metric as metric\n",
        "import kcdsl as metric_of\nmetric = None\n",
        "from kcdsl.declare import metric\n",
        "\ufefffrom kcdsl import metric\r\n",
        "try:\n    from kcdsl import metric\nexcept ImportError:\n    raise\n",
    ],
)
def test_decorator_may_be_imported_in_any_way(head: str) -> None:
    good = GOOD.replace("@metric", "@metric_of.metric") if "metric_of" in head else GOOD
    sink = Sink()
    (found,) = read_declarations(SourceFile("own.py", head + good), "own.py", sink, is_reserved)
    assert list(sink) == []
    assert found.definition.summary == "How far apart they are."
    assert found.source.text[found.span.start : found.span.end] == "gap"


def test_other_decorators_of_that_name_are_ignored() -> None:
    sink = Sink()
    text = "from statsd import metric\n" + GOOD
    assert read_declarations(SourceFile("own.py", text), "own.py", sink, is_reserved) == ()
    assert list(sink) == []


def test_positions_after_non_ascii_text() -> None:
    sink = Sink()
    text = HEAD + "x = 'ä𝄞'; y = 'é'\n" + GOOD.replace('unit="nats"', 'summary="𝄞ä", unit="natz"')
    read_declarations(SourceFile("own.py", text), "own.py", sink, is_reserved)
    (found,) = sink
    assert marked(found) == '"natz"'


def test_limits_are_exact_and_in_base_units() -> None:
    sink = Sink()
    text = HEAD + GOOD.replace('"nats"', '"ms"').replace("needs=", "lower=-0.1, upper=250, needs=")
    (found,) = read_declarations(SourceFile("own.py", text), "own.py", sink, is_reserved)
    definition = found.definition
    assert (definition.lower, definition.upper) == (Fraction(-1, 10_000), Fraction(1, 4))
    assert (definition.low, definition.high) == (-1e-4, 0.25)


# --- configuration and modules -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "code", "at"),
    [
        ('metrics = ["none.py"]', "KC220", "none.py"),
        ('metrics = ["no.such.module"]', "KC220", "no.such.module"),
        ("metrics = ['../own']", "KC220", "../own"),
        ('metrics = ["not-a-name"]', "KC220", "not-a-name"),
        ('metrics = ["/srv/own.py"]', "KC605", "/srv/own.py"),
        ('metrics = "own.py"', "KC605", "metrics"),
        ("metrics = [1]", "KC605", "metrics"),
        ("metrics = [", "KC605", ""),
        ('metrics = ["sys"]', "KC220", "sys"),
    ],
)
def test_invalid_configurations_are_reported(
    project: Project, config: str, code: str, at: str
) -> None:
    found = errors(project("require: mean(kl) <= 1", config=config))
    assert [d.code.id for d in found] == [code]
    assert marked(found[0]) == at


def test_two_modules_with_one_metric_name_clash(project: Project, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(HEAD + GOOD)
    config = 'metrics = ["own.py", "other.py"]'
    (found,) = errors(project("require: mean(kl) <= 1", config=config))
    assert found.code.id == "KC219"
    assert "other.py:gap" in found.message
    assert "own.py:gap" in found.message
    assert marked(found) == "gap"


def test_module_named_twice_does_not_clash(project: Project) -> None:
    config = 'metrics = ["own.py", "./own.py"]'
    assert errors(project("require: mean(gap) <= 1", config=config)) == []


@pytest.mark.full
def test_pyproject_in_a_parent_folder_is_read(project: Project, tmp_path: Path) -> None:
    path = project("require: mean(gap) <= 1", config="")
    (tmp_path / "kcdsl.toml").unlink()
    (tmp_path / "pyproject.toml").write_text('[tool.kcdsl]\nmetrics = ["own.py"]\n')
    inner = tmp_path / "contracts"
    inner.mkdir()
    moved = path.rename(inner / path.name)
    assert compiled(moved).metrics[0].function == "own.py:gap"


def test_modules_are_found_without_importing_packages(tmp_path: Path) -> None:
    (tmp_path / "outer" / "middle").mkdir(parents=True)
    (tmp_path / "outer" / "__init__.py").write_text("raise SystemExit\n")
    (tmp_path / "outer" / "middle" / "leaf.py").write_text("raise SystemExit\n")
    found = find_module("outer.middle.leaf", [str(tmp_path)])
    assert found == tmp_path / "outer" / "middle" / "leaf.py"
    assert find_module("outer.none", [str(tmp_path)]) is None
    assert find_module("outer.middle", [str(tmp_path)]) is None
    assert find_module("outer..leaf", [str(tmp_path)]) is None
    assert not any(name.startswith("outer") for name in sys.modules)


# --- installed packages --------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Return a function that installs modules with entry points and counts look-ups."""

    def install(**points: str) -> list[int]:
        looked: list[int] = []
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        found = EntryPoints(
            EntryPoint(name, value, "kcdsl.metrics") for name, value in points.items()
        )

        def entry_points(group: str) -> EntryPoints:
            assert group == "kcdsl.metrics"
            looked.append(1)
            return found

        monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
        return looked

    (tmp_path / "site").mkdir()
    return install


def test_entry_points_are_read_only_for_unknown_metrics(
    project: Project, installed: Callable[..., list[int]], tmp_path: Path
) -> None:
    (tmp_path / "site" / "farmetrics.py").write_text(
        HEAD + GOOD.replace("def gap", "def far") + GOOD.replace("def gap", "def near")
    )
    looked = installed(one="farmetrics:far")
    known = "forall x in points(all): norm_2(drift(attn_0, x)) <= 1"
    compiled(project(f'require: "{known}"'))
    compiled(project("require: mean(gap) <= 1 and mean(abs(log_ratio)) <= 1"))
    assert looked == []
    program = compiled(project("require: mean(far) <= 1 and mean(far) <= 2"))
    assert len(looked) == 1
    assert program.metrics[0].function == "farmetrics:far"
    assert "farmetrics" not in sys.modules
    (found,) = errors(project("require: mean(near) <= 1"))
    assert found.code.id == "KC203", "the entry point names one function of the module"


def test_entry_point_may_name_a_whole_module(
    project: Project, installed: Callable[..., list[int]], tmp_path: Path
) -> None:
    (tmp_path / "site" / "wholemetrics.py").write_text(HEAD + GOOD.replace("def gap", "def far"))
    installed(one="wholemetrics")
    assert compiled(project("require: mean(far) <= 1")).metrics[0].name == "far"
    assert set(declarations(None, Sink())) == {"far"}


def test_entry_point_without_its_module_is_reported(
    project: Project, installed: Callable[..., list[int]]
) -> None:
    installed(one="nowhere.at_all:far")
    codes = {d.code.id for d in errors(project("require: mean(far) <= 1"))}
    assert codes == {"KC220", "KC203"}


def test_two_packages_with_one_metric_name_clash(
    project: Project, installed: Callable[..., list[int]], tmp_path: Path
) -> None:
    for name in ("onemetrics", "twometrics"):
        text = HEAD + GOOD.replace("def gap", "def far")
        (tmp_path / "site" / f"{name}.py").write_text(text)
    installed(a="onemetrics:far", b="twometrics:far")
    (found,) = errors(project("require: mean(far) <= 1"))
    assert found.code.id == "KC219"
    assert "onemetrics:far" in found.message
    assert "twometrics:far" in found.message


def test_text_without_a_folder_has_no_configuration() -> None:
    sink = Sink()
    assert read_registry(None, sink).find("gap") is None
    assert list(sink) == []
