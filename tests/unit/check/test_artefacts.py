"""`kcdsl compile` refuses from headers alone what `verify` and `evaluate` would refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kcdsl.check.artefacts import check_artefacts
from kcdsl.check.compile import load_program
from kcdsl.diagnostics import Refusal
from tests.support.small_models import write_contract, write_model

HELD = "forall x in points(all): norm_inf(drift(attn_0, x)) <= 0.01"


def tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Return a change of tensors in the checkpoint; None removes one."""
    path = folder / "model.safetensors"
    held = {**load_file(path), **{k.replace("__", "."): v for k, v in changes.items()}}
    save_file({k: v for k, v in held.items() if v is not None}, path)


def configured(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewritten(folder: Path, old: str, new: str) -> None:
    path = folder / "contract.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def damaged(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


STRAY = "float32, overrides: {a: {weights: {format: float16}}}}"
DEFECTS: dict[str, tuple[Any, str]] = {
    "damaged": (damaged, "KC450"),
    "type": (lambda f: tensors(f, model__norm__weight=torch.ones(16).to(torch.int8)), "KC451"),
    "missing": (lambda f: tensors(f, model__norm__weight=None), "KC453"),
    "extra": (lambda f: tensors(f, model__norm__bias=torch.ones(16)), "KC453"),
    "size": (lambda f: tensors(f, model__norm__weight=torch.ones(17)), "KC454"),
    "depth": (lambda f: configured(f, num_hidden_layers=2), "KC453"),
    "look-alike": (lambda f: configured(f, residual_multiplier=0.22), "KC455"),
    "configuration": (lambda f: configured(f, num_attention_heads=0), "KC455"),
    "block": (lambda f: rewritten(f, "attn_0", "attn_1"), "KC459"),
    "kernel": (lambda f: rewritten(f, "torch.sdpa.flash,", "torch.scaled_mm,"), "KC465"),
    "stray": (
        lambda f: rewritten(f, "float32}", STRAY),
        "KC463",
    ),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path)
    write_contract(tmp_path, HELD, "p99(kl) <= 0.1")
    return tmp_path


@pytest.mark.parametrize("name", DEFECTS)
def test_compile_refuses_each_defect_by_code(cli: Any, folder: Path, name: str) -> None:
    assert check_artefacts(load_program(folder / "contract.yaml"), folder) == ()
    change, code = DEFECTS[name]
    change(folder)
    ran = cli("compile", cwd=folder)
    assert ran.code == 2
    assert f"error[{code}]" in ran.stderr
    assert ran.stdout == ""


@pytest.mark.full
@pytest.mark.parametrize("name", DEFECTS)
def test_later_commands_refuse_the_same(cli: Any, folder: Path, name: str) -> None:
    change, code = DEFECTS[name]
    change(folder)
    ran = cli("evaluate" if name == "kernel" else "verify", cwd=folder)
    assert ran.code == 2
    assert f"error[{code}]" in ran.stderr


def test_proof_needs_no_kernel_that_runs_here(cli: Any, folder: Path) -> None:
    write_contract(folder, HELD)
    DEFECTS["kernel"][0](folder)
    assert cli("compile", cwd=folder).code == 0


def test_contract_compiles_before_its_files_exist(cli: Any, folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != "contract.yaml":
            path.unlink()
    ran = cli("compile", cwd=folder)
    assert ran.code == 0
    assert ran.stderr.count("note[KC606]: there is no file") == 3
    assert "compiling does not need it; `verify` and `evaluate` do" in ran.stderr


@pytest.mark.parametrize("name", ["model.safetensors", "prompts.jsonl"])
def test_single_missing_file_is_refused_by_all_commands(cli: Any, folder: Path, name: str) -> None:
    (folder / name).unlink()
    for command in ("compile", "verify", "evaluate"):
        ran = cli(command, cwd=folder)
        assert ran.code == 2, command
        assert f"error[KC601]: there is no file {name}" in ran.stderr


def test_rows_without_a_slice_field_are_refused(cli: Any, folder: Path) -> None:
    rewritten(folder, "slices: {all: {}", "slices: {some: {where: 'kind == \"a\"'}, all: {}")
    path = folder / "prompts.jsonl"
    rows = [{**json.loads(line), "kind": "a"} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli("compile", cwd=folder).code == 0
    del rows[-1]["kind"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for command in ("compile", "evaluate"):
        ran = cli(command, cwd=folder)
        assert ran.code == 2, command
        assert "error[KC622]" in ran.stderr
        assert "has no field `kind`" in ran.stderr


def test_many_tensors_of_a_wrong_shape_are_one_finding(cli: Any, folder: Path) -> None:
    configured(folder, hidden_size=32)
    ran = cli("compile", cwd=folder)
    assert ran.code == 2
    assert ran.stderr.count("error[KC454]") == 1
    said = " ".join(ran.stderr.split())
    assert re.search(
        r"(\d+) tensors have other shapes than the configuration demands: "
        r"(\S+ has \([\d, ]+\), not \([\d, ]+\),? (and )?){3}\d+ more",
        said,
    )


def test_many_tensors_of_a_wrong_type_are_one_finding_of_each(cli: Any, folder: Path) -> None:
    path = folder / "model.safetensors"
    types = iter((torch.float64, torch.float64, torch.float64, torch.float64, torch.int32))
    save_file({n: t.to(next(types, t.dtype)) for n, t in load_file(path).items()}, path)
    ran = cli("compile", cwd=folder)
    assert ran.code == 2
    assert ran.stderr.count("error[KC451]") == 2
    said = " ".join(ran.stderr.split())
    assert "and 1 more are stored as F64; supported" in said
    assert " is stored as I32; supported" in said


def test_compile_does_not_run_the_factory_of_the_contract(folder: Path) -> None:
    rewritten(folder, "architecture: llama", "module: trap:build")
    (folder / "trap.py").write_text("raise SystemExit('ran')")
    assert check_artefacts(load_program(folder / "contract.yaml"), folder) == ()


def test_defective_files_raise_no_exception(folder: Path) -> None:
    configured(folder, hidden_size="16")
    try:
        program = load_program(folder / "contract.yaml")
    except Refusal:
        return
    assert [d.code.id for d in check_artefacts(program, folder)] == ["KC455"]
