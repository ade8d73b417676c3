"""`kcdsl replay`: counterexamples of violated clauses are reproduced, other documents refused."""

from __future__ import annotations

import base64
import copy
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rfc8785
import torch
from safetensors.torch import load_file, save_file

from kcdsl.check.compile import load_contract
from kcdsl.diagnostics import Refusal
from kcdsl.model.architectures.llama import build
from kcdsl.model.loader import load_model
from kcdsl.verdict.counterexample import canonical, digest_of, read_counterexample
from kcdsl_backends.certifier import replay
from kcdsl_backends.certifier.statements.problems import ProblemFactory
from tests.support.commands import run_here

CONFIG = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip
CONTRACT = """\
kcdsl: 1
contract: small
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, config: config.json, tokenizer: bytes}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager}}
  infer: {run: torch.eager, numerics: {preset: torch-eager, compute: bfloat16}}
data: prompts.jsonl
slices: {all: {}}
clauses:
  POINT: {require: "forall x in points(all): norm_inf(drift(attn_0, x)) <= 1e-6", level: L2}
  BALL: {require: "forall x in ball(all, 1e-3): norm_2(drift(mlp_0, x)) < 1e-6", level: L2}
  MODEL: {require: "forall x in points(all): norm_inf(drift(model, x)) <= 1e-6", level: L2}
"""
CLAUSES = ("POINT", "BALL", "MODEL")
Document = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a contract that is violated clause by clause, verified."""
    path = tmp_path_factory.mktemp("replay")
    torch.manual_seed(5)
    state = {
        name: torch.randn_like(p) * 0.2 + ("norm" in name)
        for name, p in build(CONFIG).named_parameters()
    }
    save_file(state, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "prompts.jsonl").write_text(json.dumps({"id": "p0", "text": "hey"}) + "\n")
    (path / "contract.yaml").write_text(CONTRACT)
    options = ("--format", "json", "--cache", "off", "--domains", "interval", "--confirm", "off")
    ran = run_here("verify", *options, cwd=path)
    assert ran.code == 1, ran.stderr
    for goal in json.loads(ran.stdout)["goals"]:
        assert goal["verdict"] == "violated"
        assert goal["counterexample"]["file"] == f"out/{goal['clause']}.counterexample.json"
    return path


@pytest.fixture
def document(folder: Path) -> Callable[[str], Document]:
    def read(clause: str) -> Document:
        return read_counterexample(folder / "out" / f"{clause}.counterexample.json")

    return read


@pytest.mark.sample(1)
@pytest.mark.parametrize("clause", CLAUSES)
def test_counterexample_is_confirmed(
    cli: Any, folder: Path, follows: Callable[..., None], clause: str
) -> None:
    file = f"out/{clause}.counterexample.json"
    raw = (folder / file).read_bytes()
    written = json.loads(raw)
    follows(written)
    assert raw == rfc8785.dumps(written)
    ran = cli("replay", file, "--format", "json", cwd=folder)
    assert ran.code == 1, ran.stderr
    found = json.loads(ran.stdout)
    follows(found)
    assert found["exact"]
    assert found["violated"]
    assert found["value"] == float.fromhex(written["attained"]["value"]) > 1e-6
    assert found["region_moved"] == 0


def test_printed_counterexample(cli: Any, folder: Path) -> None:
    ran = cli("replay", "out/POINT.counterexample.json", cwd=folder)
    assert ran.code == 1
    assert "norm_inf(drift(attn_0, x)) <= 1e-06, x in points(all)" in ran.stdout
    assert "bit for bit" in ran.stdout
    assert "violated" in ran.stdout


def test_faulty_files_are_refused(cli: Any, folder: Path, tmp_path: Path) -> None:
    good = (folder / "out" / "POINT.counterexample.json").read_bytes()
    faults = {
        "absent": None,
        "empty": b"",
        "no json": good[:-1],
        "a list": b"[]",
        "another schema": b'{"schema": "kcdsl.counterexample/2"}',
        "a float": good.replace(b'"column":', b'"column":1.5,"x":', 1),
        "twice": good.replace(b'{"attained"', b'{"clause":"x","attained"', 1),
    }
    for name, data in faults.items():
        file = tmp_path / f"{name}.json"
        if data is not None:
            file.write_bytes(data)
        ran = cli("replay", file, cwd=folder)
        assert ran.code == 2, name
        assert ("KC601" if data is None else "KC660") in ran.stderr, name
        assert ran.stdout == ""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every leaf, except later ones of lists, and of every object and list."""
    yield path
    if isinstance(value, dict):
        for number, (name, item) in enumerate(value.items()):
            if number < 4 or len(path) < 2:  # a few of many symbols represent all
                yield from places(item, (*path, name))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        document = document[step]
    return document


def put(document: Document, path: tuple[Any, ...], value: Any) -> Document:
    changed = copy.deepcopy(document)
    at(changed, path[:-1])[path[-1]] = value
    return changed


def other(value: Any) -> Iterator[Any]:
    """Yield other values of the same type, and one of another type."""
    match value:
        case bool():
            yield not value
        case int():
            yield from (value + 1, value + 1000)
        case str() if value.startswith(("0x", "-0x")):
            yield from ((float.fromhex(value) * (1 + 2**-30)).hex(), "0x0.0p+0", "inf")
        case str():
            yield from (f"{value}0", value[1:] + value[:1], "")
        case dict() | list():
            yield type(value)()
        case None:
            yield {}
    yield None if value is not None else 0


def _read(path: Path, changed: Document) -> Document:
    path.write_bytes(canonical(changed))
    return read_counterexample(path)


@pytest.mark.full
@pytest.mark.parametrize("clause", CLAUSES)
def test_changed_documents_are_refused_or_replay_another_run(
    folder: Path,
    tmp_path: Path,
    document: Callable[[str], Document],
    clause: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """First unchanged digests, then recomputed ones: refused, or another run with its own value.

    Another run is an admitted one: another symbol, order or input of the region.
    """
    good, file = document(clause), tmp_path / "changed.json"
    (program, _), kept = load_contract(folder / "contract.yaml"), {}
    original = ProblemFactory.problem
    model = load_model(program.model, folder)
    monkeypatch.setattr(replay, "load_model", lambda *_, **__: model)

    def problem(factory: Any, block: str, tokens: tuple[int, ...]) -> Any:
        key = block, tokens
        if key not in kept:
            kept[key] = original(factory, block, tokens)
        return kept[key]

    monkeypatch.setattr(ProblemFactory, "problem", problem)
    before = replay.replay(program, folder, good)
    tried = refused = 0
    for path in places(good):
        if not path or path == ("sha256",):
            continue
        for value in other(at(good, path)):
            if value == at(good, path):
                continue
            changed = put(good, path, value)
            tried += 1
            with pytest.raises(Refusal) as damaged:
                _read(file, changed)
            assert {str(d.code) for d in damaged.value.diagnostics} == {"KC660"}
            changed["sha256"] = digest_of(changed)
            try:
                found = replay.replay(program, folder, _read(file, changed))
            except Refusal as refusal:
                codes = {str(d.code) for d in refusal.diagnostics}
                assert codes <= {"KC660", "KC661", "KC662"}, (path, value)
                refused += 1
            else:
                assert path[0] in ("symbols", "orders", "attained"), (path, value)
                assert (found.symbols, found.ordered) != (before.symbols, before.ordered) or not (
                    found.exact
                ), (path, value)
    assert refused > 0.8 * tried > 50


def _packed(values: np.ndarray, kind: str, dtype: str) -> dict[str, Any]:
    data = base64.b64encode(zlib.compress(values.astype(dtype).tobytes())).decode()
    return {"kind": kind, "shape": list(values.shape), "data": data}


def _values(packed: dict[str, Any], dtype: str) -> np.ndarray:
    raw = zlib.decompress(base64.b64decode(packed["data"]))
    return np.frombuffer(raw, dtype).reshape(packed["shape"]).copy()


def forged(document: Document, **parts: Any) -> Document:
    changed = {**copy.deepcopy(document), **parts}
    return changed | {"sha256": digest_of(changed)}


def test_inadmissible_runs_with_valid_digests_are_refused(
    cli: Any, folder: Path, tmp_path: Path, document: Callable[[str], Document]
) -> None:
    ball, point = document("BALL"), document("POINT")
    x = _values(ball["input"], "<f4")
    between = np.nextafter(x.astype("<f8"), 0.0)
    outside = x.copy()
    outside[0, 0] += np.float32(3e-3)
    symbols = copy.deepcopy(ball["symbols"])
    name = next(iter(symbols["infer"]))
    shape = symbols["infer"][name]["shape"]
    symbols["infer"][name] = _packed(np.full(shape, 1.01), "float64", "<f8")
    signs = copy.deepcopy(ball["symbols"])
    signs["infer"][name] = _packed(np.full(shape, 65), "sixty-fourths", "|i1")
    wide = copy.deepcopy(ball["region"])
    wide["radius"] = _packed(np.full((1, 1), 0.5), "float64", "<f8")
    elsewhere = copy.deepcopy(ball["region"])
    centre = _values(ball["region"]["centre"], "<f8")
    elsewhere["centre"] = _packed(centre + 5e-4, "float64", "<f8")
    moved = _values(point["input"], "<f4") + np.float32(1e-2)
    nothing = _values(point["input"], "<f4") * np.float32("nan")
    for wrong, why in (
        (forged(ball, input=_packed(outside, "float32", "<f4")), "outside of the region"),
        (forged(ball, symbols=symbols), "leaves [-1, 1]"),
        (forged(ball, symbols=signs), "leaves [-1, 1]"),
        (forged(ball, input=_packed(between, "float64", "<f8")), "not float32"),
        (forged(ball, region=wide), "radius is not that of the clause"),
        (forged(ball, region=elsewhere, input=_packed(centre, "float32", "<f4")), "away from"),
        (forged(point, input=_packed(moved, "float32", "<f4")), "away from that of the case"),
        (forged(point, input=_packed(nothing, "float32", "<f4")), "not finite"),
    ):
        file = tmp_path / "wrong.json"
        file.write_bytes(canonical(wrong))
        ran = cli("replay", file, cwd=folder)
        assert ran.code == 2, why
        assert "KC662" in ran.stderr
        assert why in " ".join(ran.stderr.split())


def test_other_contract_or_checkpoint_is_refused(cli: Any, folder: Path, tmp_path: Path) -> None:
    file = folder / "out" / "POINT.counterexample.json"
    for name in ("config.json", "prompts.jsonl", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "contract.yaml").write_text(CONTRACT.replace("<= 1e-6", "<= 1e-5"))
    ran = cli("replay", file, cwd=tmp_path)
    assert (ran.code, "KC661" in ran.stderr) == (2, True)
    assert "contract.sha256" in ran.stderr
    (tmp_path / "contract.yaml").write_text(CONTRACT)
    assert cli("replay", file, cwd=tmp_path).code == 1
    weights = load_file(tmp_path / "model.safetensors")
    name = next(iter(weights))
    save_file(weights | {name: weights[name] * 1.5}, tmp_path / "other.safetensors")
    ran = cli("replay", file, "--checkpoint", tmp_path / "other.safetensors", cwd=tmp_path)
    assert (ran.code, "checkpoint.sha256" in ran.stderr) == (2, True)
    ran = cli(
        "replay", file, "--checkpoint", folder / "model.safetensors",
        "--contract", tmp_path / "contract.yaml", cwd=tmp_path.parent,
    )  # fmt: skip
    assert ran.code == 1
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "p0", "text": "other"}) + "\n")
    ran = cli("replay", file, cwd=tmp_path)
    assert (ran.code, "KC661" in ran.stderr) == (2, True)


def test_run_without_its_roundings_misses_the_claimed_value(
    cli: Any, folder: Path, tmp_path: Path, document: Callable[[str], Document]
) -> None:
    good = document("POINT")
    silent = {**good, "symbols": {"train": {}, "infer": {}}, "orders": {"train": {}, "infer": {}}}
    file = tmp_path / "silent.json"
    file.write_bytes(canonical(forged(silent)))
    ran = cli("replay", file, cwd=folder)
    assert ran.code == 2
    assert "KC662" in ran.stderr
