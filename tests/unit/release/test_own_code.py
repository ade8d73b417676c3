"""Python code of a contract is bound by digest of its compiled sources, including imports."""

from __future__ import annotations

import hashlib
import importlib
import json
import py_compile
import sys
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import pytest

from kcdsl.check.compile import load_program
from kcdsl.diagnostics import Refusal, codes
from kcdsl.model.files import Artefacts
from kcdsl.model.loader import load_model
from kcdsl.model.own_code import imported_code, record_imports
from kcdsl.release.artefacts import code_digests, metric_files
from kcdsl.release.requirements import build_triple
from kcdsl_backends.empirical.collection.resume import OwnCode, recorded_code_unchanged
from kcdsl_backends.empirical.table.checkpoint import RunCheckpoint
from tests.support.small_models import write_model

CONTRACT = """\
kcdsl: 1
contract: small
version: 1.0.0
model: {checkpoint: model.safetensors, module: "own.net:build", tokenizer: bytes}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager}}
  infer: {run: torch.sdpa.flash, numerics: {preset: torch-sdpa-flash}}
data: prompts.jsonl
slices: {all: {}}
clauses:
  N-KL: {require: p99(kl) <= 1, level: L2}
"""
NET = """\
from kcdsl.model.architectures import llama
from own.parts import taken

def build(config):
    taken()
    return llama.build(config)
"""
PARTS = """\
def taken():
    from own import late
    open(late.MARK, "a").write("source ")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a contract whose factory imports two more files, one on call.

    No module of an earlier folder is loaded.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] == "own"]:
        del sys.modules[name]
    write_model(tmp_path, rows=[{"id": "a", "text": "hello"}])
    (tmp_path / "contract.yaml").write_text(CONTRACT)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("")
    (tmp_path / "own" / "net.py").write_text(NET)
    (tmp_path / "own" / "parts.py").write_text(PARTS)
    (tmp_path / "own" / "late.py").write_text(f"MARK = {str(tmp_path / 'mark')!r}\n")
    return tmp_path


def evaluated(cli: Any, folder: Path, *words: str) -> dict[str, str]:
    """Evaluate; return the digests of the inputs in the statement."""
    ran = cli("evaluate", "--allow-code", *words, cwd=folder)
    assert ran.code == 0, ran
    statement = json.loads((folder / "out" / "evaluate.statement.json").read_text())
    return {i["name"]: i["digest"]["sha256"] for i in statement["predicate"]["inputs"]}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.full
def test_statement_names_every_imported_file(cli: Any, folder: Path) -> None:
    found = evaluated(cli, folder)
    for name in ("own/__init__.py", "own/parts.py", "own/late.py"):
        assert found[name] == sha256(folder / name)
    assert not any("kcdsl" in name or "torch" in name for name in found)


@pytest.mark.full
def test_changed_sibling_module_changes_the_inputs(cli: Any, folder: Path) -> None:
    evaluated(cli, folder)
    assert cli("keygen", cwd=folder).code == 0
    statement = "out/evaluate.statement.json"
    assert cli("sign", statement, "--key", "kcdsl.key", cwd=folder).code == 0
    words = ("check", "out/evaluate.cert.json", "--key", "kcdsl.key.pub")
    assert cli(*words, cwd=folder).code == 0
    (folder / "own" / "parts.py").write_text(PARTS + "# another\n")
    ran = cli(*words, cwd=folder)
    assert ran.code == 4
    assert "own/parts.py changed" in ran.stdout
    (folder / "own" / "parts.py").unlink()
    ran = cli(*words, cwd=folder)
    assert ran.code == 0
    assert "not at hand: own/parts.py" in " ".join(ran.stdout.split())
    ran = cli(*words, "--complete", cwd=folder)
    assert ran.code == 4
    assert "input/not-at-hand" in ran.stdout


@pytest.mark.full
def test_bytecode_caches_are_neither_read_nor_written(cli: Any, folder: Path) -> None:
    """The cache is marked as unchecked against its source."""
    stale = folder / "stale.py"
    stale.write_text(PARTS.replace("source", "cache"))
    cache = Path(cache_from_source(str(folder / "own" / "parts.py")))
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(stale), str(cache), dfile="own/parts.py", invalidation_mode=mode)
    evaluated(cli, folder)
    assert set((folder / "mark").read_text().split()) == {"source"}
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


@pytest.mark.full
def test_change_between_two_runs_of_a_process_is_imported(cli: Any, folder: Path) -> None:
    evaluated(cli, folder)
    (folder / "own" / "parts.py").write_text(PARTS.replace("source", "changed"))
    found = evaluated(cli, folder)
    assert (folder / "mark").read_text().split()[-1] == "changed"
    assert found["own/parts.py"] == sha256(folder / "own" / "parts.py")


@pytest.mark.full
def test_file_changed_during_the_run_gets_no_statement(cli: Any, folder: Path) -> None:
    late = folder / "own" / "late.py"
    (folder / "own" / "parts.py").write_text(
        PARTS + f"    open({str(late)!r}, 'a').write('# more\\n')\n"
    )
    ran = cli("evaluate", "--allow-code", cwd=folder)
    assert ran.code == 2
    assert "own/late.py changed while the command ran" in ran.stderr
    assert not (folder / "out" / "evaluate.statement.json").exists()


WAYS = {
    "by its path": """\
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("another", PLACE)
another = module_from_spec(spec)
spec.loader.exec_module(another)
""",
    "a module that another object replaces": "from own import another",
    "a module that is forgotten": "import sys, own.another as one; del sys.modules[one.__name__]",
    "a link that leads elsewhere": "from own import another",
    "a folder of PYTHONPATH": "import another",
    "imported before": "from own import another",
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_import_a_file_is_recorded(
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    """Compiled caches would set another mark if anything read them."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    place = (elsewhere if "PYTHONPATH" in way else folder / "own") / "another.py"
    real = elsewhere / "real.py" if "link" in way else place
    text = f"open({str(folder / 'mark')!r}, 'a').write('source ')\n"
    if "replaces" in way:
        text += "import sys; sys.modules[__name__] = object()\n"
    real.write_text(text)
    if real != place:
        place.symlink_to(real)
    stale = folder / "stale.py"
    stale.write_text(text.replace("source", "cache"))
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    cache = cache_from_source(str(place))
    py_compile.compile(str(stale), cache, dfile=str(place), invalidation_mode=mode)
    monkeypatch.delitem(sys.modules, "another", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    monkeypatch.syspath_prepend(elsewhere)
    (folder / "own" / "net.py").write_text(f"PLACE = {str(place)!r}\n{WAYS[way]}\n")
    if way == "imported before":
        monkeypatch.syspath_prepend(folder)
        importlib.import_module("own.net")
        (folder / "mark").unlink()
    record_imports("own.net", folder / "own" / "net.py", folder)
    monkeypatch.syspath_prepend(folder)
    importlib.import_module("own.net")
    found = imported_code(Artefacts.of(folder))
    name, digest = found[real.resolve()]
    assert digest == sha256(real)
    assert name == {
        "a link that leads elsewhere": "module own.another",
        "a folder of PYTHONPATH": "module another",
    }.get(way, "own/another.py")
    assert (folder / "mark").read_text().split() == ["source"]


def test_module_of_a_folder_that_the_code_adds_is_bound(
    cli: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "far_away.py"
    elsewhere.write_text("FACTOR = 1\n")
    added = f"import sys; sys.path.insert(0, {str(elsewhere.parent)!r}); import far_away\n"
    (folder / "own" / "net.py").write_text(added + NET)
    try:
        found = evaluated(cli, folder)
    finally:
        sys.path.remove(str(elsewhere.parent))
        del sys.modules["far_away"]
    assert found["module far_away"] == sha256(elsewhere)


def test_code_digests_leave_out_the_module_that_the_contract_names(folder: Path) -> None:
    program, files = load_program(folder / "contract.yaml"), Artefacts.of(folder)
    load_model(program.model, files)
    others = ("own/__init__.py", "own/late.py", "own/parts.py")
    assert code_digests(program, files) == {name: sha256(folder / name) for name in others}


def test_file_changed_after_its_import_is_not_stated(folder: Path) -> None:
    program, files = load_program(folder / "contract.yaml"), Artefacts.of(folder)
    load_model(program.model, files)
    (folder / "own" / "parts.py").write_text(PARTS + "# another\n")
    with pytest.raises(Refusal, match=r"own/parts\.py changed while") as refused:
        code_digests(program, files)
    assert refused.value.diagnostics[0].code is codes.CHANGED_MEANWHILE


def test_triple_needs_the_module_of_the_factory(folder: Path) -> None:
    program = load_program(folder / "contract.yaml")
    (folder / "own" / "net.py").unlink()
    with pytest.raises(Refusal, match=r"no module own\.net with a source file") as refused:
        build_triple(program, folder)
    assert refused.value.diagnostics[0].code is codes.FILE_MISSING


def test_previously_imported_package_is_reloaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)
    (folder / "own" / "late.py").write_text("MARK = 1\n")
    assert importlib.import_module("own.late").MARK == 1
    (folder / "own" / "late.py").write_text("MARK = 234\n")
    record_imports("own.net", folder / "own" / "net.py", folder)
    assert importlib.import_module("own.late").MARK == 234


def test_helpers_of_two_contracts_may_share_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(("one", "other")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"net_of_{name}.py").write_text("import helper_of_both\n")
        (folder / "helper_of_both.py").write_text(f"NUMBER = {number}\n")
        record_imports(f"net_of_{name}", folder / f"net_of_{name}.py", folder)
        with monkeypatch.context() as patched:
            patched.syspath_prepend(folder)
            net = importlib.import_module(f"net_of_{name}")
        found: int = net.helper_of_both.NUMBER
        assert found == number
        assert (folder / "helper_of_both.py").resolve() in imported_code(Artefacts.of(folder))


def test_file_changed_between_two_imports_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A metric that is loaded after the model would import the new version."""
    program, files = load_program(folder / "contract.yaml"), Artefacts.of(folder)
    load_model(program.model, files)
    (folder / "own" / "parts.py").write_text(PARTS + "# another\n")
    record_imports("own.gauge", folder / "own" / "gauge.py", folder)
    monkeypatch.syspath_prepend(folder)
    importlib.import_module("own.parts")
    with pytest.raises(Refusal) as refused:
        imported_code(files)
    assert "own/parts.py changed" in refused.value.diagnostics[0].message


METRIC = """\
from kcdsl import metric
from own.parts import gain

@metric(
    family="statistical", needs=["logits"], counted="token", better="lower",
    unit="nats", summary="the largest difference of logits",
)
def gap(train_logits, infer_logits):
    return gain * abs(train_logits - infer_logits).max(axis=1)
"""


@pytest.mark.parametrize(("before", "after"), [("@metric", "@dict"), ("def gap", "def another")])
def test_metric_that_is_no_longer_declared_is_refused(
    folder: Path, before: str, after: str
) -> None:
    gauge = folder / "own" / "gauge.py"
    gauge.write_text(METRIC)
    (folder / "kcdsl.toml").write_text('metrics = ["own.gauge"]\n')
    (folder / "contract.yaml").write_text(CONTRACT.replace("p99(kl)", "p99(gap)"))
    program = load_program(folder / "contract.yaml")
    assert metric_files(program, folder) == {"own.gauge": gauge}
    gauge.write_text(METRIC.replace(before, after))
    with pytest.raises(Refusal, match=r"own\.gauge:gap declares no `gap` any more") as refused:
        metric_files(program, folder)
    assert refused.value.diagnostics[0].code is codes.METRIC_FUNCTION


@pytest.mark.full
def test_modules_of_metrics_are_bound_with_their_imports(cli: Any, folder: Path) -> None:
    (folder / "own" / "gauge.py").write_text(METRIC)
    (folder / "own" / "parts.py").write_text("gain = 1.0\n")
    (folder / "kcdsl.toml").write_text('metrics = ["own.gauge"]\n')
    plain = CONTRACT.replace('module: "own.net:build"', "architecture: llama, config: config.json")
    (folder / "contract.yaml").write_text(plain.replace("p99(kl)", "p99(gap)"))
    found = evaluated(cli, folder)
    assert found["own/parts.py"] == sha256(folder / "own" / "parts.py")
    assert found["own.gauge"] == sha256(folder / "own" / "gauge.py")
    assert "own/gauge.py" not in found


@pytest.mark.full
def test_code_of_another_contract_is_not_in_the_statement(
    cli: Any, folder: Path, tmp_path: Path
) -> None:
    evaluated(cli, folder)
    other = tmp_path / "elsewhere"
    other.mkdir()
    assert imported_code(Artefacts.of(other)) == {}


@pytest.mark.full
@pytest.mark.parametrize("command", ["evaluate", "verify"])
def test_imports_of_a_worker_are_bound(cli: Any, folder: Path, command: str) -> None:
    (folder / "own" / "alone.py").write_text("VALUE = 1\n")
    (folder / "own" / "net.py").write_text(
        NET.replace(
            "    taken()\n",
            "    import multiprocessing\n"
            "    if multiprocessing.parent_process() is not None:\n"
            "        import own.alone\n",
        )
    )
    if command == "verify":
        (folder / "contract.yaml").write_text(
            CONTRACT.replace(
                "p99(kl) <= 1", '"forall x in points(all): norm_inf(drift(mlp_0, x)) <= 9"'
            )
        )
    more = ("--cache", "off") if command == "verify" else ()
    ran = cli(command, "--allow-code", "--jobs", "2", "--engine", "processes", *more, cwd=folder)
    assert ran.code == 0, ran
    (path,) = (folder / "out").glob("*.statement.json")
    inputs = json.loads(path.read_text())["predicate"]["inputs"]
    found = {i["name"]: i["digest"]["sha256"] for i in inputs}
    assert found["own/alone.py"] == sha256(folder / "own" / "alone.py")


def test_imports_of_a_resumed_run_are_bound(tmp_path: Path) -> None:
    late = tmp_path / "late.py"
    late.write_text("VALUE = 1\n")
    code = {str(late): ("late.py", sha256(late))}
    checkpoint = RunCheckpoint(tmp_path / "kept.run-checkpoint")
    checkpoint.open("key")
    before = OwnCode(Artefacts.of(tmp_path), checkpoint)
    before.imported(code)
    before.keep()
    checkpoint.close()

    def again() -> tuple[bool, dict[str, tuple[str, str]]]:
        files, kept = Artefacts.of(tmp_path), RunCheckpoint(tmp_path / "kept.run-checkpoint")
        kept.open("key")
        same = recorded_code_unchanged(kept, files)
        kept.close()
        return same, files.code

    assert again() == (True, code)
    late.write_text("VALUE = 2\n")
    assert again() == (False, {})
    late.unlink()
    assert again() == (False, {})


def test_workers_that_import_other_bytes_are_refused(tmp_path: Path) -> None:
    files = Artefacts.of(tmp_path)
    files.record_code({"late.py": ("late.py", "0" * 64)})
    files.record_code({"late.py": ("late.py", "0" * 64)})
    with pytest.raises(Refusal) as refused:
        files.record_code({"late.py": ("late.py", "1" * 64)})
    assert "late.py changed" in refused.value.diagnostics[0].message
