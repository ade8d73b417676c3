"""Experiments on the tiny language model: cells, refusals, caching, pages."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
import torch

from kcdsl.check.compile import load_program
from kcdsl.diagnostics import Refusal
from kcdsl.model import own_code
from kcdsl.model.adapters import ADAPTERS
from kcdsl.verdict.html.experiment import experiment_page, maps
from kcdsl.verdict.quantities import rate_text
from kcdsl.verdict.studies.experiment import entry, not_run
from kcdsl_backends.empirical.backend import BACKEND
from kcdsl_backends.empirical.questions.cells import CHECKPOINT, cells_in, manifest
from kcdsl_backends.empirical.questions.conditions import Axes, run_grid
from kcdsl_backends.empirical.questions.variants import run_single, variants
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel
from kcdsl_backends.empirical.statistics import estimates, rates

if TYPE_CHECKING:
    from tests.conftest import Cli

_CONTRACT = """kcdsl: 1
contract: swept
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, config: config.json}
kernels:
  train: {run: torch.eager, numerics: {compute: float32}}
  infer: {run: torch.eager, numerics: {compute: bfloat16}}
data: prompts.jsonl
slices: {all: {}, safety: {where: 'category == "safety"'}}
clauses:
  N-KL: {require: p99(kl) <= 1e-4 nats, slices: [all, safety], level: L2}
  N-LINF: {require: max(logit_linf) <= 0.1, budget: 40% of requests, slices: [all], level: L2}
  R-LATENCY: {require: p95(latency) <= 9 s, slices: [all], level: L1}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    made = tmp_path_factory.mktemp("swept")
    for name in ("model.safetensors", "config.json"):
        shutil.copy(repository / "examples/tiny_lm" / name, made / name)
    lines = (repository / "examples/tiny_lm/prompts.jsonl").read_text().splitlines()
    (made / "prompts.jsonl").write_text("\n".join(lines[::2]) + "\n")
    (made / "contract.yaml").write_text(_CONTRACT)
    return made


@pytest.fixture(scope="module")
def grid(folder: Path) -> dict[str, Any]:
    axes = Axes(("cpu", "cuda"), (8, 16), (1, 3), (1, 2))
    return run_grid(
        BACKEND.prepare, load_program(folder / "contract.yaml"), folder, folder / "e2", axes=axes
    )


def _cells(document: dict[str, Any]) -> dict[tuple[Any, ...], dict[str, Any]]:
    axes = ("device", "length", "batch", "concurrency")
    return {tuple(cell[axis] for axis in axes): cell for cell in document["cells"]}


@pytest.mark.full
def test_every_combination_has_a_cell(grid: dict[str, Any], follows: Callable[[Any], None]) -> None:
    follows(grid)
    cells = _cells(grid)
    assert len(cells) == len(grid["cells"]) == 16
    for (device, *_), cell in cells.items():
        if device == "cpu":
            assert cell["status"] == "ran"
    assert grid["deferred"].keys() == {"R-LATENCY"}


@pytest.mark.full
def test_one_stream_and_batch_equal_a_single_request(grid: dict[str, Any]) -> None:
    """Threads do not change a result: rows of one and of two streams are bitwise equal."""
    cells = _cells(grid)
    for length in (8, 16):
        for batch in (1, 3):
            one, two = (cells["cpu", length, batch, c]["rows"] for c in (1, 2))
            assert one == two


@pytest.mark.full
def test_cell_of_single_requests_equals_evaluation_of_cut_requests(
    grid: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """An independent computation: cut the file, evaluate it, compare counts and values."""
    for name in ("model.safetensors", "config.json", "contract.yaml"):
        shutil.copy(folder / name, tmp_path / name)
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    kept = [
        {**row, "text": row["text"].encode()[:16].decode()}
        for row in rows
        if len(row["text"].encode()) >= 16
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    program = load_program(tmp_path / "contract.yaml")
    setting = BACKEND.prepare(program, tmp_path, crosscheck=False, seconds=0.1)
    report = BACKEND.conclude(BACKEND.gather(setting, lambda stage, done, total: None))
    cell = _cells(grid)["cpu", 16, 1, 1]
    assert cell["requests"] == len(kept)
    for row in cell["rows"]:
        same = next(
            r for r in report.clauses if (r.clause, r.slice) == (row["clause"], row["slice"])
        )
        assert (row["value"], row["n"]) == (same.value, same.n)
        assert same.exceedance is not None
        assert row["passed"] == same.exceedance.n - same.exceedance.k


@pytest.mark.full
def test_requests_with_equal_cut_prompts_are_one_unit(folder: Path, tmp_path: Path) -> None:
    """40 requests that differ only after their 8th token are one unit at that length.

    One prompt allows no inference about others; at 16 tokens there are 40.
    """
    for name in ("model.safetensors", "config.json"):
        shutil.copy(folder / name, tmp_path / name)
    rows = [{"id": str(i), "text": f"Please, request {i:02}."} for i in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    clauses = "clauses:\n  N: {require: p90(kl) <= 1 nats, evidence: sample, level: L2}\n"
    head = _CONTRACT.partition("clauses:")[0].partition("slices:")[0]
    (tmp_path / "contract.yaml").write_text(f"{head}slices: {{all: {{}}}}\n{clauses}")
    program = load_program(tmp_path / "contract.yaml")
    axes = Axes(("cpu",), (8, 18), (1,), (1,))
    short, long = run_grid(BACKEND.prepare, program, tmp_path, tmp_path / "e2", axes=axes)["cells"]
    assert [(row["n"], row["verdict"]) for row in short["rows"]] == [(1, "inconclusive")]
    assert [(row["n"], row["verdict"]) for row in long["rows"]] == [(40, "held")]


@pytest.mark.full
def test_states_depend_on_the_batch(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of the kernel move by 1 for every further request of a batch."""
    for name in ("model.safetensors", "config.json", "prompts.jsonl"):
        shutil.copy(folder / name, tmp_path / name)
    clauses = "clauses:\n  N: {require: max(hidden_linf) <= 1/2, slices: [all], level: L2}\n"
    (tmp_path / "contract.yaml").write_text(_CONTRACT.partition("clauses:")[0] + clauses)
    plain = TorchKernel.hidden

    def moved(kernel: TorchKernel, ids: Any) -> torch.Tensor:
        states = plain(kernel, ids)
        return states + (len(states) - 1 if states.dim() == 3 else 0)

    monkeypatch.setattr(TorchKernel, "hidden", moved)
    axes = Axes(("cpu",), (16,), (1, 3), (1, 2))
    program = load_program(tmp_path / "contract.yaml")
    cells = _cells(run_grid(BACKEND.prepare, program, tmp_path, tmp_path / "e2", axes=axes))
    found = {key[2:]: cell["rows"][0] for key, cell in cells.items()}
    assert {key: row["verdict"] for key, row in found.items()} == {
        (1, 1): "held",
        (1, 2): "held",
        (3, 1): "violated",
        (3, 2): "violated",
    }
    assert found[3, 1]["value"] == pytest.approx(2, abs=0.5)


def test_pass_rates_have_exact_limits(grid: dict[str, Any]) -> None:
    rows = [row for cell in grid["cells"] if cell["status"] == "ran" for row in cell["rows"]]
    assert any(0 < row["rate"] < 1 for row in rows)
    for row in rows:
        low, high = rates.limits(row["passed"], row["n"], estimates.ONE_LOOK)
        assert row["low"] == pytest.approx(low, abs=1e-9)
        assert row["high"] == pytest.approx(high, abs=1e-9)
        assert row["low"] <= row["rate"] <= row["high"]
        assert ("few units" in row["narrow"]) >= (row["n"] < 20)


@pytest.mark.full
def test_cells_are_cached_until_their_inputs_change(folder: Path) -> None:
    program = load_program(folder / "contract.yaml")

    def again(**how: Any) -> tuple[dict[str, Any], int]:
        runs = 0

        def prepare(*given: Any, **named: Any) -> Any:
            nonlocal runs
            runs += 1
            return BACKEND.prepare(*given, **named)

        axes = Axes(("cpu",), (8,), (1, 3), (1,))
        found = run_grid(prepare, program, folder, folder / "again", axes=axes, **how)
        return found, runs

    first, loaded = again()
    assert loaded == 1
    kept = folder / "again" / CHECKPOINT
    second, loaded = again()
    assert (second, loaded) == (first, 0)
    kept.write_bytes(kept.read_bytes()[:-40])  # a damaged cell is measured again
    assert again() == (first, 1)
    assert again(seed=1)[1] == 1
    assert again(seed=1, fresh=True)[1] == 1


def test_refused_cell_is_retried(tmp_path: Path) -> None:
    from kcdsl.diagnostics import codes, refuse

    def fails() -> dict[str, Any]:
        raise refuse(codes.EXPERIMENT, "not here")

    with cells_in(tmp_path, {"of": "this"}) as cells:
        assert cells.cell("a", {"n": 1}, fails) == {
            "n": 1,
            "status": "not_run",
            "reason": "KC683: not here",
        }
    with cells_in(tmp_path, {"of": "this"}) as cells:
        assert cells.cell("a", {"n": 1}, lambda: {"rows": []})["status"] == "ran"
    with cells_in(tmp_path, {"of": "this"}) as cells:
        assert cells.cell("a", {"n": 1}, fails)["status"] == "ran"
        assert cells.cell("a", {"n": 2}, fails)["status"] == "not_run"


@pytest.mark.full
@pytest.mark.parametrize("to", [b'"rows": [2]', b'"rows": []', b""], ids=["changed", "torn", "cut"])
def test_changed_cell_is_measured_again(tmp_path: Path, to: bytes) -> None:
    measured: list[int] = []

    def measure() -> dict[str, Any]:
        measured.append(1)
        return {"rows": [1]}

    def again(of: str = "this", name: str = "a") -> dict[str, Any]:
        with cells_in(tmp_path, {"of": of}) as cells:
            return cells.cell(name, {"n": 1}, measure)

    first = again()
    assert again() == first
    assert len(measured) == 1
    file = tmp_path / CHECKPOINT
    assert b'"rows": [1]' in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(b'"rows": [1]', to))
    assert again() == first
    assert len(measured) == 2
    again(name="b")
    again(of="that")
    assert len(measured) == 4


@pytest.mark.full
def test_cell_is_measured_again_after_a_code_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lately_imported.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    own_code.record_imports("lately_imported", tmp_path / "lately_imported.py", tmp_path)
    measured: list[int] = []

    def measure() -> dict[str, Any]:
        import_module("lately_imported")
        measured.append(1)
        return {"rows": []}

    def again() -> None:
        with cells_in(tmp_path / "out", {"of": "this"}, base=tmp_path) as cells:
            cells.cell("a", {"n": 1}, measure)

    again()
    again()
    assert len(measured) == 1
    (tmp_path / "lately_imported.py").write_text("VALUE = 2\n")
    again()
    assert len(measured) == 2


def test_every_variant_differs_in_one_setting(folder: Path) -> None:
    kernel = load_program(folder / "contract.yaml").infer
    found = variants(kernel)
    assert len({variant.name for variant in found}) == len(found)
    assert {variant.factor for variant in found} == {
        "none",
        "precision",
        "attention",
        "quantisation",
    }
    for variant in found:
        match variant.factor:
            case "none":
                assert variant.kernel == kernel
            case "precision":
                assert variant.kernel.run == kernel.run
                assert dict(variant.kernel.numerics)["compute"] != "bfloat16"
            case "attention":
                assert variant.kernel.run != kernel.run
                assert dict(variant.kernel.numerics)["compute"] == "bfloat16"
            case "quantisation" if variant.kernel.run == kernel.run:
                stated = {k: v for k, v in variant.kernel.numerics if k != "weights"}
                assert stated == dict(kernel.numerics)
    assert {v.kernel.run for v in found if v.factor == "attention"} | {kernel.run} == {
        name for name, adapter in ADAPTERS.items() if adapter.engine in ("torch", "compile")
    }


@pytest.mark.full
def test_single_change_variant_equals_an_evaluation(
    folder: Path, follows: Callable[[Any], None]
) -> None:
    program = load_program(folder / "contract.yaml")
    only = ("compute-float32", "attention-sdpa.cudnn", "weights-int8-full-per-tensor")
    document = run_single(
        BACKEND.prepare, program, folder, folder / "e1", device="cpu", only=only, seconds=0.1
    )
    follows(document)
    cells = {cell["name"]: cell for cell in document["cells"]}
    assert list(cells) == ["as-stated", *only]
    assert cells["attention-sdpa.cudnn"]["status"] == "not_run"
    assert "cudnn" in cells["attention-sdpa.cudnn"]["reason"]

    def value(name: str) -> float:
        return next(float(r["value"]) for r in cells[name]["rows"] if r["clause"] == "N-KL")

    assert value("compute-float32") == 0.0
    assert 0 < value("as-stated") < value("weights-int8-full-per-tensor")
    setting = BACKEND.prepare(program, folder, crosscheck=False, seconds=0.1)
    report = BACKEND.conclude(BACKEND.gather(setting, lambda stage, done, total: None))
    assert value("as-stated") == next(r.value for r in report.clauses if r.clause == "N-KL")
    page = experiment_page(document)
    assert "weights-int8-full-per-tensor" in page
    assert "attention-sdpa.cudnn" in page


def test_unknown_variant_is_refused(folder: Path) -> None:
    program = load_program(folder / "contract.yaml")
    with pytest.raises(Refusal, match="no variant 'compute-float8'"):
        run_single(
            BACKEND.prepare, program, folder, folder / "x", device="cpu", only=["compute-float8"]
        )


def test_charts_show_every_cell_and_are_well_formed(grid: dict[str, Any]) -> None:
    found = maps(grid)
    assert [one.title.partition(":")[0] for one in found] == [
        "N-KL on all",
        "N-KL on safety",
        "N-LINF on all",
    ]
    for one in found:
        root = ElementTree.fromstring(one.svg)
        assert len(root.findall("g")) == 16
        words = "".join(root.itertext())
        assert "cuda, 2 streams" in words
        assert "not run: KC" in words
    page = experiment_page(grid)
    assert page.count("<svg") == 3
    assert "http" not in page.replace("http-equiv", "")
    assert "<script" not in page


def test_rates_are_never_rounded_to_0_or_100_percent() -> None:
    assert [rate_text(r) for r in (0.0, 1.0, 0.9999, 0.0001, 0.625)] == [
        "0%",
        "100%",
        "99.9%",
        "0.1%",
        "62.5%",
    ]
    cells = [{"status": "not_run", "reason": "KC1: no", "name": str(i)} for i in range(6)]
    assert list(not_run(cells)) == ["not run: 6 cells, 0 first: KC1: no"]


@pytest.mark.full
def test_command_writes_all_files(cli: Cli, folder: Path, tmp_path: Path) -> None:
    words = ["--device", "cpu", "--length", "8", "--batch", "2", "--concurrency", "1"]
    contract = str(folder / "contract.yaml")
    ran = cli("experiment", "e2", contract, *words, "-o", str(tmp_path / "out"), "--format", "json")
    assert ran.code == 0
    assert json.loads(ran.stdout)["cells"][0]["status"] == "ran"
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert names == [
        "cells.run-checkpoint",
        "e2.html",
        "e2.json",
    ]
    none = cli(
        "experiment", "e2", contract, "--device", "cuda", "--length", "8", "-o", str(tmp_path)
    )
    assert none.code in (0, 2)
    shown = cli("experiment", "e2", contract, *words, "-o", str(tmp_path / "out"))
    assert "cpu 8 tokens x2 /1" in shown.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("e1", "--length", "8"), "--length is for e2"),
        (("e1", "--concurrency", "2"), "--concurrency is for e2"),
        (("e2", "--only", "precision"), "--only is for e1"),
        (("e1", "--device", "cpu", "--device", "cuda"), "e1 runs on one device"),
    ],
)
def test_options_of_another_experiment_are_refused(
    cli: Cli, folder: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    kind, *options = words
    out = tmp_path / "out"
    ran = cli("experiment", kind, str(folder / "contract.yaml"), *options, "-o", str(out))
    assert ran.code == 2
    assert said in ran.stderr
    assert not out.exists()


def test_long_title_is_wrapped(grid: dict[str, Any]) -> None:
    """It takes as many lines as it needs, and moves the cells down."""
    slice_ = "a_slice_of_many_words" * 8
    cells = [
        {**cell, "rows": [{**row, "slice": slice_} for row in cell["rows"]]}
        for cell in grid["cells"]
        if cell["status"] == "ran"
    ]
    short, long = (maps({**grid, "cells": found})[0] for found in (grid["cells"], cells))
    drawn = ElementTree.fromstring(long.svg)
    bold = [e for e in drawn.iter("text") if "14px" in e.get("style", "")]
    assert "".join(e.text or "" for e in bold).replace(" ", "") == long.title.replace(" ", "")
    assert len(bold) > 1
    assert all(len(e.text or "") * 8 < long.width for e in bold)
    down = 18 * (len(bold) - 1)
    tall = [
        float(ElementTree.fromstring(m.svg).get("viewBox", "").split()[3]) for m in (short, long)
    ]
    assert tall[1] == tall[0] + down


@pytest.mark.full
def test_failed_precondition_invalidates_every_cell(folder: Path, tmp_path: Path) -> None:
    """The kernel has other weights than the file: every cell names the finding of `evaluate`."""
    program = load_program(folder / "contract.yaml")

    def hot(*given: Any, **named: Any) -> Any:
        setting: Any = BACKEND.prepare(*given, **named)
        with torch.no_grad():
            setting.infer.module.lm_head.weight.mul_(1 / 0.7)
        return setting

    axes = Axes(("cpu",), (16,), (1, 4), (1,))
    document = run_grid(hot, program, folder, tmp_path, axes=axes)
    for cell in document["cells"]:
        assert cell["status"] == "ran"
        assert {row["verdict"] for row in cell["rows"]} == {"invalid_evidence"}
        assert {check["name"] for check in cell["failed_checks"]}
    assert "precheck" in experiment_page(document)


@pytest.mark.parametrize("changed", ["config.json", "prompts.jsonl", "model.safetensors"])
def test_cell_key_covers_every_input_file(folder: Path, tmp_path: Path, changed: str) -> None:
    for file in folder.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path / file.name)
    program = load_program(tmp_path / "contract.yaml")
    before = manifest(program, tmp_path, 0)
    (tmp_path / changed).write_bytes((tmp_path / changed).read_bytes() + b" ")
    assert manifest(program, tmp_path, 0) != before


def test_cell_key_covers_the_machine_and_its_settings(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environment variables and torch settings select other kernels."""
    program = load_program(folder / "contract.yaml")
    before = manifest(program, folder, 0)
    assert manifest(program, folder, 0) == before
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    switched = manifest(program, folder, 0)
    assert switched != before
    assert switched["machine"]["switches"]["environment"]["MKL_CBWR"] == "COMPATIBLE"
    monkeypatch.delenv("MKL_CBWR")
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert manifest(program, folder, 0) != before


def test_checkpoint_folder_is_digested_file_by_file(tmp_path: Path) -> None:
    program = load_program(Path("examples/tiny_lm/contract.yaml").resolve())
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "a.safetensors").write_bytes(b"1")
    held = replace(program, model=replace(program.model, checkpoint="weights", config=None))
    first = manifest(held, tmp_path, 0)
    assert list(first["files"]) == ["weights/a.safetensors"]
    (tmp_path / "weights" / "a.safetensors").write_bytes(b"2")
    assert manifest(held, tmp_path, 0)["files"] != first["files"]


@pytest.mark.full
def test_both_parts_of_a_conjunction_decide_a_variant_cell(folder: Path, tmp_path: Path) -> None:
    text = _CONTRACT.replace(
        "  N-KL: {require: p99(kl) <= 1e-4 nats,",
        "  N-KL: {require: mean(tv) <= 0 and p99(tv) <= 9/10,",
    )
    (tmp_path / "contract.yaml").write_text(text)
    for name in ("model.safetensors", "config.json", "prompts.jsonl"):
        shutil.copy(folder / name, tmp_path / name)
    program = load_program(tmp_path / "contract.yaml")
    document = run_single(
        BACKEND.prepare, program, tmp_path, tmp_path / "e1", device="cpu",
        only=("compute-float16",), seconds=0.1,
    )  # fmt: skip
    for cell in document["cells"]:
        found = entry(cell, ("N-KL", "all"))
        assert found is not None
        assert [row["verdict"] for row in found.rows] == ["violated", "held"]
        assert found.words.startswith("✗")
