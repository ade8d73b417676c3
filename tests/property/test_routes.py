"""Routes of mixtures of experts (relational-interval.md, Rule 5.8).

No simulated run of either kernel chooses experts other than those of a graph whose premise was
derived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kcdsl_backends.attack.routes import OtherRoute, other_route
from kcdsl_backends.attack.simulation import Rerouted, Simulator
from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.boxes.state import Entering
from kcdsl_backends.lirpa.backend import drift_box
from kcdsl_backends.vnnlib.export import case_files
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.tensors import read
from tests.support import proofs
from tests.support.prover import block, parameters

N = proofs.numerics
EXACT = N("float32", "nearest")
KERNELS = (EXACT, N("float32"), N("bfloat16"), N("bfloat16", "nearest"), N("float16"))
DOMAINS = ("interval", "affine")


def router(
    gate: np.ndarray, route: list[list[int]], width: int, *, twice: bool = False
) -> proofs.Graph:
    """Return a graph of the shares of a router with this route.

    `twice` reads the logits in two softmaxes, whose readings differ where casts are free.
    """
    rows, experts = len(route), len(gate)
    graph = proofs.Graph((rows, width))
    x, weight = graph.add("input", [], (rows, width)), graph.param("gate.weight", gate)
    logits = graph.add("linear", [x, weight], (rows, experts))
    routed = graph.add("route", [logits], (rows, experts), experts=route)
    mask = np.zeros((rows, experts), dtype=np.bool_)
    for row, chosen in enumerate(route):
        mask[row, chosen] = True
    masked = graph.constant("mask", mask)
    shares = [graph.add("softmax", [routed, masked], (rows, experts)) for _ in range(1 + twice)]
    if twice:
        graph.add("concat", shares, (rows, 2 * experts), dim=1)
    return graph


def problem_of(graph: proofs.Graph, pair: Any) -> BlockProblem:
    return BlockProblem(block(graph), *(parameters(graph, record) for record in pair))


def confirmed(
    graph: proofs.Graph, pair: Any, x: np.ndarray, radius: float, domain: str, folder: Path
) -> str:
    """Return "" where the checker derives a bound, else the reason."""
    sha256 = proofs.write_safetensors(folder / "model.safetensors", graph.tensors)
    train, infer = pair
    document = proofs.document(graph, train, infer, sha256, x, radius)
    document["cases"][0]["domain"] = domain
    try:
        proof = parse(proofs.dump(document))
        Derivation(proof, read(folder / "model.safetensors").tensors).derive(proof.cases[0])
    except Rejected as rejection:
        return rejection.reason
    return ""


def bounded(problem: BlockProblem, x: np.ndarray, radius: float, domain: str) -> str:
    """Return "" where the prover has a bound, else the reason."""
    centre, spread = torch.from_numpy(x), torch.full((1, 1), radius, dtype=torch.float64)
    try:
        if domain == "interval":
            problem.bound(centre, spread)
        else:
            problem.forms(centre, spread).box()
    except NoBound as no:
        return str(no)
    return ""


def chosen_otherwise(problem: BlockProblem, x: np.ndarray, radius: float, runs: int) -> bool:
    """Return whether a simulated run of a kernel may choose other experts than the graph.

    By its logits or by shares in float32; ties count.
    """
    graph = problem.graph
    route = next(node for node in graph.nodes if node.op == "route")
    logits = type(graph)("logits", graph.nodes, route.inputs[0], graph.constants, (1,))
    chosen = torch.zeros(route.shape, dtype=torch.bool)
    for row, experts in enumerate(route.attrs["experts"]):
        chosen[row, experts] = True
    drawn = torch.Generator().manual_seed(0)

    def signs(shape: Any) -> Tensor:
        return torch.rand(shape, generator=drawn, dtype=torch.float64).mul(2).sub(1).sign()

    for stored in (problem.train, problem.infer):
        simulator = Simulator(logits, stored.numerics, stored)
        for _ in range(runs):
            entering = (torch.from_numpy(x) + radius * signs(x.shape)).float().double()
            symbols = {name: signs(shape) for name, shape in simulator.symbol_shapes().items()}
            found = simulator.run(entering, symbols)
            for numbers in (found, torch.softmax(found.float(), -1)):
                least = torch.where(chosen, numbers, torch.inf).amin(-1)
                others = torch.where(chosen, -torch.inf, numbers).amax(-1)
                if not bool((least > others).all()):
                    return True
    return False


def random_router(seed: int) -> tuple[proofs.Graph, Any, np.ndarray, float]:
    """Return a router with its route on x, two kernels, x, and the radius of a ball around it."""
    rng = np.random.default_rng(seed)
    rows, width, experts = (int(rng.integers(1, n)) for n in (4, 9, 9))
    k = int(rng.integers(1, experts + 1))
    gate = rng.standard_normal((experts, width)).astype(np.float32)
    x = rng.standard_normal((rows, width)).astype(np.float32).astype(np.float64)
    if rng.random() < 0.5:  # two experts whose logits are close for the first row
        apart = float(rng.choice([0.0, 2.0**-22, 2.0**-11, 2.0**-10, 2.0**-9, 2.0**-6]))
        gate[-1] = gate[0] + (apart / (x[0] @ x[0]) * x[0]).astype(np.float32)
    logits = torch.from_numpy(x @ gate.astype(np.float64).T)
    route = logits.topk(k, -1).indices.sort(-1).values.tolist()
    pair = tuple(KERNELS[int(i)] for i in rng.integers(0, len(KERNELS), 2))
    graph = router(gate, route, width, twice=bool(rng.integers(0, 2)))
    return graph, pair, x, float(rng.choice([0.0, 0.0, 1e-4, 1e-2]))


def searched(problem: BlockProblem, x: np.ndarray, radius: float) -> OtherRoute | None:
    """Return the run with another route that the attack finds."""
    spread = torch.full((1, 1), radius, dtype=torch.float64)
    return other_route(*problem.simulators(), torch.from_numpy(x), spread)


def compare(seed: int, runs: int, folder: Path) -> tuple[bool, bool, bool]:
    """Compare both programs and simulated runs.

    Return whether a bound was found, and a run that chooses otherwise: at random, where ties count,
    and by the attack.
    """
    graph, pair, x, radius = random_router(seed)
    problem = problem_of(graph, pair)
    otherwise = chosen_otherwise(problem, x, radius, runs)
    held = False
    for domain in DOMAINS:
        reason, refused = (
            bounded(problem, x, radius, domain),
            confirmed(graph, pair, x, radius, domain, folder),
        )
        assert refused in ("", "bound/route"), refused
        assert not (reason == "" and refused), "the checker does not confirm the prover"
        assert not (refused == "" and otherwise), "a run leaves the route that was derived"
        held |= refused == ""
    found = searched(problem, x, radius) is not None
    assert not (held and found), "the search finds a run where none can be"
    return held, otherwise, found


@pytest.mark.full
def test_runs_keep_a_derived_route(tmp_path: Path) -> None:
    found = [compare(seed, 4, tmp_path) for seed in range(16)]
    held, otherwise, searched = map(sum, zip(*found, strict=True))
    assert held > 3
    assert otherwise > 1
    assert searched >= 1


@pytest.mark.full
def test_runs_keep_many_derived_routes(tmp_path: Path) -> None:
    found = [compare(seed, 40, tmp_path) for seed in range(16, 316)]
    held, otherwise, searched = map(sum, zip(*found, strict=True))
    assert held > 80
    assert otherwise > 25
    assert searched > 20


def two_experts(apart: float) -> tuple[proofs.Graph, np.ndarray]:
    """Return a router whose first expert has a logit higher by exactly `apart`."""
    gate = np.array([[1.0, apart], [1.0, 0.0]], dtype=np.float32)
    return router(gate, [[0]], 2), np.array([[0.0, 1.0]])


@pytest.mark.parametrize(
    ("apart", "sure"),
    [(0.0, False), (2.0**-30, False), (2.0**-11, False), (2.0**-10, False), (2.0**-9, True)],
)
@pytest.mark.parametrize("domain", DOMAINS)
def test_margin_covers_the_error_of_shares(
    apart: float, sure: bool, domain: str, tmp_path: Path
) -> None:
    graph, x = two_experts(apart)
    reason = bounded(problem_of(graph, (EXACT, EXACT)), x, 0.0, domain)
    assert (reason == "") is sure
    assert confirmed(graph, (EXACT, EXACT), x, 0.0, domain, tmp_path) == (
        "" if sure else "bound/route"
    )
    if not sure:
        assert "kernel may choose expert 1 in place of 0" in reason


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("domain", DOMAINS)
def test_both_kernels_must_keep_the_route(turned: bool, domain: str, tmp_path: Path) -> None:
    """bfloat16 rounds 1 + 2^-9 to 1: only the route of the float32 kernel is certain."""
    gate = np.array([[1.0, 2.0**-9], [1.0, 0.0]], dtype=np.float32)
    graph, x = router(gate, [[0]], 2), np.array([[1.0, 1.0]])
    coarse = N("bfloat16", "nearest")
    pair = (coarse, EXACT) if turned else (EXACT, coarse)
    which = "training" if turned else "inference"
    which = "a" if domain == "affine" else f"the {which}"
    assert f"{which} kernel may choose" in bounded(problem_of(graph, pair), x, 0.0, domain)
    assert confirmed(graph, pair, x, 0.0, domain, tmp_path) == "bound/route"
    assert confirmed(graph, (EXACT, EXACT), x, 0.0, domain, tmp_path) == ""


@pytest.mark.parametrize("domain", DOMAINS)
def test_region_that_crosses_a_routing_boundary_has_no_bound(domain: str, tmp_path: Path) -> None:
    graph, x = two_experts(1.0)
    for radius, sure in ((0.25, True), (1.5, False)):
        assert (bounded(problem_of(graph, (EXACT, EXACT)), x, radius, domain) == "") is sure
        refused = confirmed(graph, (EXACT, EXACT), x, radius, domain, tmp_path)
        assert refused == ("" if sure else "bound/route")


def test_affine_forms_compare_pairs_of_experts(tmp_path: Path) -> None:
    """Both logits change by 30 in the region, together."""
    gate = np.array([[1.0, 100.0], [0.5, 100.0]], dtype=np.float32)
    graph, x = router(gate, [[0]], 2), np.array([[1.0, 0.0]])
    for radius, sure in ((0.3, True), (1.0, False)):
        assert bounded(problem_of(graph, (EXACT, EXACT)), x, radius, "interval")
        found = bounded(problem_of(graph, (EXACT, EXACT)), x, radius, "affine")
        assert (found == "") is sure
        refused = confirmed(graph, (EXACT, EXACT), x, radius, "affine", tmp_path)
        assert refused == ("" if sure else "bound/route")


@pytest.mark.parametrize("twice", [False, True])
def test_every_reading_must_keep_the_route(twice: bool, tmp_path: Path) -> None:
    """The logits differ by 2^-5; free casts to bfloat16 change each by 2^-8 of itself, and x."""
    for size, sure in ((1.25, True), (5.0, False)):
        gate = np.array([[size + 2.0**-5], [size]], dtype=np.float32)
        graph, x = router(gate, [[0]], 1, twice=twice), np.array([[1.0]])
        pair = (EXACT, N("bfloat16", weights=("float32", "none")))
        for domain in DOMAINS:
            assert (bounded(problem_of(graph, pair), x, 0.0, domain) == "") is sure
            refused = confirmed(graph, pair, x, 0.0, domain, tmp_path)
            assert refused == ("" if sure else "bound/route")


@pytest.mark.parametrize("domain", DOMAINS)
def test_chosen_shares_must_be_normal_numbers(domain: str, tmp_path: Path) -> None:
    gate = np.array([[0.0], [-70.0], [-80.0]], dtype=np.float32)
    graph, x = router(gate, [[0, 1]], 1), np.array([[1.0]])
    assert "may be subnormal" in bounded(problem_of(graph, (EXACT, EXACT)), x, 0.0, domain)
    assert confirmed(graph, (EXACT, EXACT), x, 0.0, domain, tmp_path) == "bound/route"


@pytest.mark.parametrize(
    ("route", "reason"),
    [
        ([[0, 1]], ""),
        ([[0, 2]], "bound/route"),
        ([[1, 2]], "bound/route"),
        ([[0, 0]], "graph/field"),
        ([[1, 0]], "graph/field"),
        ([[0, 3]], "graph/field"),
        ([[]], "graph/field"),
        ([[0, 1], [0, 1]], "graph/field"),
        ([["0", "1"]], "graph/field"),
        ([[False, True]], "graph/field"),
    ],
)
@pytest.mark.parametrize("domain", DOMAINS)
def test_other_route_in_a_proof_is_rejected(
    route: Any, reason: str, domain: str, tmp_path: Path
) -> None:
    gate = np.array([[3.0], [2.0], [1.0]], dtype=np.float32)
    graph, x = router(gate, [[0, 1]], 1), np.array([[1.0]])
    next(node for node in graph.nodes if node["op"] == "route")["attrs"]["experts"] = route
    assert confirmed(graph, (EXACT, EXACT), x, 0.0, domain, tmp_path) == reason


def test_every_position_chooses_equally_many_experts(tmp_path: Path) -> None:
    gate = np.array([[3.0], [2.0], [1.0]], dtype=np.float32)
    graph, x = router(gate, [[0, 1], [0]], 1), np.array([[1.0], [1.0]])
    assert confirmed(graph, (EXACT, EXACT), x, 0.0, "interval", tmp_path) == "graph/field"


@pytest.mark.parametrize("domain", DOMAINS)
def test_scales_of_several_rows_have_no_rule(domain: str, tmp_path: Path) -> None:
    graph, x = two_experts(1.0)
    for scale, sure in (("per_token", True), ("per_tensor", False)):
        pair = (EXACT, N("bfloat16", activations=("int8", scale)))
        assert (bounded(problem_of(graph, pair), x, 0.0, domain) == "") is sure
        refused = confirmed(graph, pair, x, 0.0, domain, tmp_path)
        assert refused == ("" if sure else "rule/route")


def test_many_experts_have_no_rule() -> None:
    gate = np.zeros((2049, 1), dtype=np.float32)
    gate[0] = 3.0
    problem = problem_of(router(gate, [[0]], 1), (EXACT, EXACT))
    for domain in DOMAINS:
        assert "up to 2048 experts" in bounded(problem, np.array([[1.0]]), 0.0, domain)


def test_other_programs_have_no_router() -> None:
    graph, x = two_experts(1.0)
    problem = problem_of(graph, (EXACT, EXACT))
    region = torch.from_numpy(x), torch.zeros(1, 1, dtype=torch.float64)
    with pytest.raises(NoBound, match="the module has no operation route"):
        drift_box(problem, *region, "ibp")
    nodes = tuple(n for n in problem.graph.nodes if n.op in ("input", "param", "linear", "route"))
    alone = replace(problem.graph, nodes=nodes, output=nodes[-1].name)
    with pytest.raises(NoBound, match="a query has no operation route"):
        case_files(replace(problem, graph=alone), "a", region, Fraction(1), "<=")


def test_routes_of_states_that_drift_or_by_chance_have_no_rule() -> None:
    graph, x = two_experts(1.0)
    problem, centre = problem_of(graph, (EXACT, EXACT)), torch.from_numpy(x)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    moved = replace(problem, entering=Entering(Box(0 * centre, 0 * centre)))
    cases: list[Callable[[], object]] = [
        lambda: moved.bound(centre, zero),
        lambda: moved.forms(centre, zero),
        lambda: problem.forms(centre, zero, Fraction(1, 100)),
    ]
    for case in cases:
        with pytest.raises(NoBound, match="routes have no rule"):
            case()


@pytest.mark.parametrize("domain", ["planes", "affine+planes"])
def test_linear_bounds_have_no_rule_for_routers(domain: str, tmp_path: Path) -> None:
    graph, x = two_experts(1.0)
    assert confirmed(graph, (EXACT, EXACT), x, 0.0, domain, tmp_path) == "document/domain"


def test_simulated_run_routes_by_its_own_logits() -> None:
    graph, x = two_experts(1.0)
    simulator, _ = problem_of(graph, (EXACT, EXACT)).simulators()
    simulator.run(torch.from_numpy(x), {})
    for other in (-1.0, 0.0):  # expert 1 is above, and equal
        with pytest.raises(Rerouted):
            simulator.run(torch.tensor([[0.0, other]], dtype=torch.float64), {})


def test_attack_reaches_the_other_expert() -> None:
    """The logits differ by x₁, which is 1 at the centre of the region."""
    graph, x = two_experts(1.0)
    problem = problem_of(graph, (EXACT, EXACT))
    assert searched(problem, x, 0.0) is None
    assert searched(problem, x, 0.99) is None
    found = searched(problem, x, 1.5)
    assert found is not None
    assert (found.position, found.expert, found.other, found.moved) == (0, 0, 1, True)
    assert 0.49 < found.above <= 0.5
    assert "an input of the region chooses expert 1 in place of 0 at position 0" in str(found)


@pytest.mark.parametrize("turned", [False, True])
def test_attack_names_the_kernel(turned: bool) -> None:
    """Factors of 1 ± 2^-8 in bfloat16 reverse logits 1 + 2^-9 and 1; float32 rounding does not."""
    gate = np.array([[1.0, 2.0**-9], [1.0, 0.0]], dtype=np.float32)
    graph, x = router(gate, [[0]], 2), np.array([[1.0, 1.0]])
    coarse = N("bfloat16")
    found = searched(problem_of(graph, (coarse, EXACT) if turned else (EXACT, coarse)), x, 0.0)
    assert found is not None
    assert found.kernel == ("training" if turned else "inference")
    assert not found.moved
    assert 0 < found.above < 2.0**-6


def test_attack_covers_every_router() -> None:
    """The first router chooses by x₁ > 0, the second by x₁ > x₀ / 2, around the point (1, 1)."""
    graph, _ = two_experts(1.0)
    first = next(node["name"] for node in graph.nodes if node["op"] == "route")
    weight = graph.param("second.weight", np.array([[1.0, -1.0], [0.0, 0.5]], dtype=np.float32))
    logits = graph.add("linear", [first, weight], (1, 2))
    graph.add("route", [logits], (1, 2), experts=[[0]])
    problem, x = problem_of(graph, (EXACT, EXACT)), np.array([[1.0, 1.0]])
    assert searched(problem, x, 0.25) is None
    found = searched(problem, x, 0.5)
    assert found is not None
    assert 0.24 < found.above < 0.26
