"""Recorded runs are reproduced bit for bit when simulated again.

True orders of float32 and bfloat16 sums stay below the drift that symbols attain and below every
bound.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kcdsl.ir.terms import ModelRef
from kcdsl.model.architecture import Model
from kcdsl.model.architectures.bert import build as build_bert
from kcdsl.model.architectures.llama import build as build_llama
from kcdsl.model.loader import load_model
from kcdsl.model.presets import resolve
from kcdsl_backends.attack import attack, with_orders
from kcdsl_backends.attack.operations import ORDERS
from kcdsl_backends.attack.runs import (
    InvalidRecord,
    RunPair,
    attack_of,
    functional,
    pack,
    record_run,
    run_of,
)
from kcdsl_backends.attack.simulation import Overflowed, Simulator
from kcdsl_backends.certifier.replay import _region_difference
from kcdsl_backends.certifier.statements.problems import BlockProblem, ProblemFactory
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.functionals import row_bounds
from tests.support.directed import DIRECTED

LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32, "tie_word_embeddings": True, "attention_bias": True,
}  # fmt: skip
BERT = {
    "model_type": "bert", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "vocab_size": 32, "max_position_embeddings": 32,
    "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
}  # fmt: skip
TOKENS = (1, 5, 9, 2, 30)
KERNELS: Mapping[str, dict[str, Any]] = {
    "float32 fused": {"preset": "torch-sdpa-flash"},
    "bfloat16 any": {"preset": "torch-eager", "compute": "bfloat16"},
    "bfloat16 sums": {"preset": "torch-eager", "compute": "bfloat16", "accumulate": "bfloat16"},
    "bfloat16 nearest": {"preset": "torch-eager", "compute": "bfloat16", "casts": "nearest"},
    "fp8 w8a8": {"preset": "fp8-w8a8-per-channel", "casts": "nearest"},
    "int8 dynamic": {"preset": "onnxruntime-int8"},
    **DIRECTED,
}


@pytest.fixture(scope="module", params=["llama", "bert"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(str(request.param))
    torch.manual_seed(8)
    config, build = (LLAMA, build_llama) if request.param == "llama" else (BERT, build_bert)
    state = {n: torch.randn_like(p) * 0.25 + 0.05 for n, p in build(config).named_parameters()}
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    ref = ModelRef("model.safetensors", architecture=str(request.param), tokenizer="bytes")
    return load_model(ref, folder)


@cache
def shop_of(model_id: int, infer: str) -> ProblemFactory:
    train, inference = resolve({"preset": "torch-eager"}), resolve(KERNELS[infer])
    return ProblemFactory(MODELS[model_id], train, inference, torch.device("cpu"))


MODELS: dict[int, Model] = {}


def problem_of(model: Model, block: str, infer: str) -> tuple[BlockProblem, torch.Tensor]:
    MODELS[id(model)] = model
    factory = shop_of(id(model), infer)
    centre = factory.centre(block, TOKENS)
    assert centre is not None
    return factory.problem(block, TOKENS), centre


def again(run: RunPair, simulators: tuple[Simulator, Simulator]) -> RunPair:
    """Return a run after a JSON round trip."""
    record = json.loads(json.dumps(record_run(run)))
    return run_of(record, dict(zip(("train", "infer"), simulators, strict=True)))


@pytest.mark.full
@pytest.mark.parametrize("infer", KERNELS)
@pytest.mark.parametrize(("block", "radius"), [("attn_0", 0.0), ("mlp_0", 1e-3)])
def test_recorded_run_is_reproduced(model: Model, block: str, infer: str, radius: float) -> None:
    problem, centre = problem_of(model, block, infer)
    simulators = problem.simulators()
    spread = torch.full((1, 1), radius, dtype=torch.float64)
    kind = ("inf", "2", "span")[list(KERNELS).index(infer) % 3]
    found = attack(*simulators, kind, centre, spread, candidates=1, rounds=3, restarts=0)
    assert found.run is not None
    assert all(
        bool((symbol.abs() <= 1).all())
        for side in found.run.symbols.values()
        for symbol in side.values()
    )
    same = again(found.run, simulators)
    assert attack_of(same, *simulators, kind) == found
    assert same.x is not None
    assert bool(((same.x - centre).abs() <= spread).all())
    ordered = with_orders(found.run, *simulators, kind)
    assert ordered is not None
    assert ordered.run is not None
    assert attack_of(again(ordered.run, simulators), *simulators, kind) == ordered


@pytest.mark.full
def test_attack_is_reproducible(model: Model) -> None:
    problem, centre = problem_of(model, "attn_0", "bfloat16 any")
    spread = torch.full((1, 1), 1e-3, dtype=torch.float64)
    one, two = (
        attack(*problem.simulators(), "inf", centre, spread, candidates=2, rounds=3, seed=5)
        for _ in range(2)
    )
    assert one == two
    assert one.run is not None
    assert two.run is not None
    assert record_run(one.run) == record_run(two.run)


@pytest.mark.full
@pytest.mark.parametrize("infer", ["float32 fused", "bfloat16 any", "bfloat16 sums"])
@pytest.mark.parametrize("block", ["attn_0", "mlp_0"])
def test_real_summation_orders_stay_below_attack_and_bounds(
    model: Model, block: str, infer: str
) -> None:
    problem, centre = problem_of(model, block, infer)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    train, simulated = problem.simulators()
    symbols = attack(train, simulated, "inf", centre, zero)
    boxes = [problem.bound(centre, zero).output.drift]
    try:
        boxes.append(problem.forms(centre, zero).box())
    except NoBound as no:
        assert infer == "bfloat16 sums", no  # noqa: PT017
    exact = train.run(centre, {}), simulated.run(centre, {})
    largest = 0.0
    for order in ORDERS:
        run = RunPair(centre, {}, {"infer": dict.fromkeys(simulated.ordered, order)})
        out_train, out_infer = run.outputs(train, simulated)
        drift = out_infer - out_train
        assert not torch.equal(out_infer, exact[1])
        assert torch.equal(out_train, exact[0])
        for box in boxes:
            assert bool(((box.lo <= drift) & (drift <= box.hi)).all())
        largest = max(largest, float(functional(drift, "inf").amax()))
    assert 0 < largest <= symbols.value


@pytest.mark.parametrize("infer", ["float32 fused", "bfloat16 any"])
def test_sum_symbols_of_an_order_are_admitted(model: Model, infer: str) -> None:
    """At each node, the error of an order is a symbol in [-1, 1]."""
    problem, centre = problem_of(model, "attn_0", infer)
    _, simulator = problem.simulators()
    ones = {
        f"sum {name}": torch.ones(shape, dtype=torch.float64)
        for name, shape in ((n.name, n.shape) for n in problem.graph.nodes)
        if name in simulator.sums
    }
    for name in sorted(simulator.sums):
        cut = replace(simulator, graph=replace(problem.graph, output=name))
        silent = {f"cast {name}": torch.zeros(cut.graph.node(name).shape, dtype=torch.float64)}
        exact = cut.run(centre, silent)
        allowed = (cut.run(centre, {**silent, f"sum {name}": ones[f"sum {name}"]}) - exact).abs()
        for order in ORDERS:
            off = (cut.run(centre, silent, {name: order}) - exact).abs()
            assert bool((off <= allowed * (1 + 1e-9)).all())


def test_value_beyond_its_format_is_not_a_run(model: Model) -> None:
    numerics = resolve({"preset": "torch-eager", "compute": "float16"})
    factory = ProblemFactory(model, numerics, numerics, torch.device("cpu"))
    problem = factory.problem("mlp_0", TOKENS)
    train, infer = problem.simulators()
    x = torch.full((len(TOKENS), 16), 1e6, dtype=torch.float64)
    with pytest.raises(Overflowed, match="float16"):
        train.run(x, {})
    assert attack_of(RunPair(x, {}), train, infer, "inf") is None


def test_inadmissible_run_is_refused(model: Model) -> None:
    problem, centre = problem_of(model, "attn_0", "bfloat16 any")
    simulators = dict(zip(("train", "infer"), problem.simulators(), strict=True))
    good = record_run(RunPair(centre, {}))
    shape = simulators["infer"].symbol_shapes()
    name = next(n for n in shape if n.startswith("sum "))
    beyond = torch.zeros(shape[name], dtype=torch.float64)
    beyond.view(-1)[0] = 1 + 2.0**-40
    sum_node = name.removeprefix("sum ")

    def changed(**parts: Any) -> dict[str, Any]:
        return {**json.loads(json.dumps(good)), **parts}

    def symbols(**infer: Any) -> dict[str, Any]:
        return {"train": {}, "infer": infer}

    packed = record_run(RunPair(centre, {"infer": {name: beyond}}))["symbols"]["infer"][name]
    zeros = pack(torch.zeros(shape[name], dtype=torch.float64), packed["kind"])
    run_of(good, simulators)
    for wrong, why in (
        (changed(symbols=symbols(**{name: packed})), "leaves"),
        (changed(symbols=symbols(**{"sum of nothing": packed})), "no rounding symbol"),
        (changed(symbols=symbols(**{name: {**packed, "shape": [1]}})), "shape"),
        (changed(symbols=symbols(**{name: {**packed, "kind": "int8"}})), "kind"),
        (changed(symbols=symbols(**{name: {**packed, "data": packed["data"][:-4]}})), "damaged"),
        (changed(symbols=symbols(**{name: {**packed, "data": "%"}})), "damaged"),
        (changed(orders={"train": {}, "infer": {sum_node: "sideways"}}), "no order"),
        (changed(orders={"train": {}, "infer": {"x": "forward"}}), "no sum"),
        (changed(input=None), "does not fit"),
        (
            changed(
                orders={"train": {}, "infer": {sum_node: "forward"}},
                symbols=symbols(**{name: {**packed, "data": zeros["data"]}}),
            ),
            "has an order and a symbol",
        ),
    ):
        with pytest.raises(InvalidRecord, match=why):
            run_of(wrong, simulators)


@pytest.mark.parametrize(
    ("tokens", "region", "why"),
    [
        (True, {"kind": "points", "radius": {}}, "token ids have no region but themselves"),
        (False, {"kind": "ball"}, "the region has no centre or no radius"),
        (False, {"kind": "points", "radius": {}}, "a point has no radius"),
    ],
)
def test_region_of_another_kind_is_refused(tokens: bool, region: dict[str, Any], why: str) -> None:
    x = None if tokens else torch.zeros(1, 2, dtype=torch.float64)
    case: Any = SimpleNamespace(centre=x)
    with pytest.raises(InvalidRecord, match=why):
        _region_difference(RunPair(x, {}), case, {"centre": None, "radius": None, **region})


def test_unknown_functionals_have_no_value() -> None:
    x = torch.zeros(1, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match="unknown functional 'mean'"):
        functional(x, "mean")
    with pytest.raises(ValueError, match="unknown functional 'mean'"):
        row_bounds(Box(x, x), "mean")
