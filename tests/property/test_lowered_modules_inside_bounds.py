"""Real runs of user-written modules lie inside the bounds of their lowered graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kcdsl.diagnostics import Refusal
from kcdsl.ir.terms import KernelRef
from kcdsl.model.attention import composed_attention
from kcdsl.model.presets import resolve
from kcdsl_backends.certifier.statements.problems import ProblemFactory, claim_margin
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_backends.empirical.sources.kernels.torch_kernel import load_kernel
from tests.support.random_modules import model_of

ROWS, WIDTH = 5, 4
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Part(nn.Module):
    """A block on [5, 4]: a function of itself and of x."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("number", torch.tensor(0.1), persistent=False)
        steps = torch.tensor([1.0, 0.1, 0.01, 0.001])
        self.register_buffer("steps", steps, persistent=False)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def cube(x: Tensor) -> Tensor:
    return x.reshape(ROWS, 2, 2)


def gate(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def root_norm(s: Any, x: Tensor) -> Tensor:
    normed: Tensor = x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * s.gain
    return normed


def root_norm_of_one(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


MODULES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "swapaxes": lambda s, x: (
        x.reshape(2, 2, 5).swapaxes(0, 1).reshape(ROWS, WIDTH) * s.steps.to(x.dtype)
    ),
    "T of three dimensions": lambda s, x: cube(x).T.flatten(1) - 0.5,
    "a number that is added": lambda s, x: x + -3.3,
    "a table in float32": lambda s, x: x * (3.0 * torch.arange(ROWS)[:, None]).cos(),
    "a table from a buffer": lambda s, x: (
        x * torch.outer(300.0 * torch.arange(float(ROWS)), s.steps).cos().to(x.dtype)
    ),
    "a gate": lambda s, x: gate(8 * x),
    "a cast": lambda s, x: x.to(torch.bfloat16).to(x.dtype) * 0.3,
    "a buffer without dimensions": lambda s, x: x * s.number,
    "a norm that is written out": root_norm,
    "a norm of large numbers": lambda s, x: root_norm(s, 300 * x),
    "a gain that is one more than a parameter": lambda s, x: (
        root_norm_of_one(x.float()) * (1.0 + s.gain.float())
    ).type_as(x),
    "a weight that is computed": lambda s, x: F.linear(
        x, 2.0 * s.gain * torch.arange(WIDTH)[:, None], s.gain
    ),
    "attention without heads": lambda s, x: composed_or_not(x),
    "a softmax in float32": lambda s, x: torch.softmax(x, -1, dtype=torch.float32).to(x.dtype),
    "a random table": lambda s, x: x * torch.rand(WIDTH),
}


def composed_or_not(x: Tensor) -> Tensor:
    """Return attention as the kernels of this test compute it; traced, it is one operation."""
    if torch.compiler.is_exporting():
        return F.scaled_dot_product_attention(x, x, x)
    return composed_attention(x, x, x)


@pytest.mark.sample(4)
@pytest.mark.filterwarnings("ignore:The use of")
@pytest.mark.parametrize("format", HALVES)
@pytest.mark.parametrize("name", MODULES)
def test_modules_are_within_their_bounds(name: str, format: str) -> None:
    """A module has sound bounds in every domain, or none."""
    part = Part(MODULES[name]).eval().requires_grad_(False)
    train, infer = (resolve({"preset": "torch-eager", "compute": f}) for f in ("float32", format))
    factory = ProblemFactory(model_of(part, WIDTH), train, infer, torch.device("cpu"))
    drawn = torch.Generator().manual_seed(3)
    for scale in (1.0, 40.0):
        x = scale * torch.randn(ROWS, WIDTH, generator=drawn)
        wide = part(x)
        halved: nn.Module = copy.deepcopy(part).to(HALVES[format])
        narrow = halved(x.to(HALVES[format]))
        real = (wide.double() - narrow.double()).abs().nan_to_num(nan=torch.inf)
        for bound in bounds(factory, x.double()):
            assert bool((real <= bound * claim_margin(train, infer)).all())


def bounds(factory: ProblemFactory, x: Tensor) -> list[Tensor]:
    """Return the bounds of the domains at a point."""
    try:
        problem = factory.problem("part", tuple(range(ROWS)))
    except Refusal:
        return []
    radius = torch.zeros(1, 1, dtype=torch.float64)
    found: list[Tensor] = []
    domains: list[Callable[[], Tensor]] = [
        lambda: problem.bound(x, radius).output.drift.mag(),
        lambda: problem.forms(x, radius).box().mag(),
    ]
    for bounded in domains:
        try:
            found.append(bounded())
        except NoBound:
            found.append(torch.tensor(torch.inf, dtype=torch.float64))
    return found


@pytest.mark.parametrize("style", ["composed", "fused"])
def test_softmax_of_no_attention_is_stored_as_any_result(style: str) -> None:
    """The format of probabilities is that of an attention: a router stores bfloat16."""
    part = Part(lambda s, x: torch.softmax(x, -1)).eval().requires_grad_(False)
    inside = {"style": style, "probabilities": "float32"}
    infer = resolve({"preset": "torch-eager", "compute": "bfloat16", "attention": inside})
    train = resolve({"preset": "torch-eager", "compute": "float32"})
    factory = ProblemFactory(model_of(part, WIDTH), train, infer, torch.device("cpu"))
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3)).bfloat16()
    real = (part(x.float()).double() - part(x).double()).abs()
    found = bounds(factory, x.double())
    assert len(found) == 2
    assert all(bool((real <= bound * claim_margin(train, infer)).all()) for bound in found)


@pytest.mark.filterwarnings("ignore:The use of")
@pytest.mark.parametrize("name", MODULES)
def test_most_modules_are_lowered(name: str) -> None:
    """Few of these modules are refused, so the test above is not vacuous."""
    train, infer = (
        resolve({"preset": "torch-eager", "compute": f}) for f in ("float32", "bfloat16")
    )
    part = Part(MODULES[name]).eval().requires_grad_(False)
    factory = ProblemFactory(model_of(part, WIDTH), train, infer, torch.device("cpu"))
    if name in ("a random table", "a table from a buffer"):
        with pytest.raises(Refusal):
            factory.problem("part", tuple(range(ROWS)))
    else:
        assert factory.problem("part", tuple(range(ROWS))).graph.block == "part"


SUMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a linear with a computed weight": lambda s, x: F.linear(x, 2.0 * (0.5 * s.weight), s.row),
    "a linear with a computed bias": lambda s, x: F.linear(x, s.weight, 2.0 * (0.5 * s.row)),
    "addmm": lambda s, x: torch.addmm(s.row, x, s.weight.T),
    "addmm with a computed weight": lambda s, x: torch.addmm(s.row, x, (2.0 * (0.5 * s.weight)).T),
}


@pytest.mark.parametrize("name", SUMS)
def test_sum_may_start_with_the_added_bias(name: str) -> None:
    """Kernels of products use the bias as the first term: small terms may be lost beside it."""
    terms, drawn = 300, torch.Generator().manual_seed(0)
    part = Part(SUMS[name])
    part.weight = nn.Parameter(torch.rand(2, terms, generator=drawn))
    part.row = nn.Parameter(torch.tensor([1.0, 1.5]))
    x = 2.0**-25 * torch.rand(3, terms, generator=drawn)
    started = part.row.detach().expand(3, 2)
    for k in range(terms):
        started = started + x[:, k : k + 1] * part.weight.detach()[:, k]
    exact = x.double() @ part.weight.double().T + part.row.double()
    wide, narrow = (
        resolve({"preset": "torch-eager", "compute": f}) for f in ("float64", "float32")
    )
    factory = ProblemFactory(model_of(part, terms), wide, narrow, torch.device("cpu"))
    problem, point = factory.problem("part", (0, 1, 2)), torch.zeros(1, 1, dtype=torch.float64)
    real, margin = (started.double() - exact).abs(), claim_margin(wide, narrow)
    assert bool((real > 2.0**-22).all())
    assert bool((real <= problem.bound(x.double(), point).output.drift.mag() * margin).all())
    assert bool((real <= problem.forms(x.double(), point).box().mag() * margin).all())


class Residual(nn.Module):
    """x plus a product of many terms, which are all lost where the sum starts with x."""

    def __init__(self, terms: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, terms, bias=False), nn.Linear(terms, 64, bias=False)
        nn.init.constant_(self.up.weight, 2.0**-6)
        nn.init.constant_(self.down.weight, 0.49 * 2.0**-23 / 192)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != 64:
            return x
        found: Tensor = x + self.down(F.relu(self.up(x)))
        return found


@pytest.mark.programs
def test_compiled_sum_does_not_start_with_the_residual() -> None:
    model = model_of(Residual(6000), 64)
    claims = (("torch.eager", "float64"), ("torch.compile", "float32"))
    refs = [KernelRef(run, (("compute", compute),)) for run, compute in claims]
    wide, compiled = (load_kernel(ref, model, "cpu") for ref in refs)
    factory = ProblemFactory(model, wide.numerics, compiled.numerics, torch.device("cpu"))
    x = torch.ones(64, 64)
    real = (compiled.block("part", x) - wide.block("part", x)).abs()
    problem, point = (
        factory.problem("part", tuple(range(64))),
        torch.zeros(1, 1, dtype=torch.float64),
    )
    assert bool((real <= problem.bound(x.double(), point).output.drift.mag()).all())


class OwnProduct(nn.Module):
    """A block that multiplies by the weight of a linear in its own way."""

    def __init__(self, function: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.lin, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        """Return [5, 4]."""
        return self.function(self.lin, x)


INT8 = {"format": "int8", "scale": "per_channel"}
PLAIN = {"format": "float32", "scale": "none"}


@pytest.mark.parametrize(
    ("function", "linear"),
    [
        (lambda lin, x: F.linear(x, lin.weight, lin.bias), True),
        (lambda lin, x: F.linear(x, lin.weight, 2.0 * lin.bias), False),
        (lambda lin, x: x @ lin.weight, False),
    ],
    ids=["linear", "computed bias", "not transposed"],
)
def test_quantised_products_that_are_no_linears_are_refused(
    function: Callable[[nn.Linear, Tensor], Tensor], linear: bool
) -> None:
    """The kernel reads the quantised weight, and bounds of a plain product would not."""
    model = model_of(OwnProduct(function).eval().requires_grad_(False), WIDTH)
    eager = {"preset": "torch-eager"}
    left = {**eager, "weights": INT8, "overrides": {"part.lin": {"weights": PLAIN}}}
    for spec, able in (({**eager, "weights": INT8}, linear), (eager, True), (left, True)):
        factory = ProblemFactory(model, resolve(eager), resolve(spec), torch.device("cpu"))
        if able:
            factory.problem("part", tuple(range(ROWS)))
            continue
        with pytest.raises(
            Refusal, match=r"lin\.weight, which is quantised, but is no linear"
        ) as no:
            factory.problem("part", tuple(range(ROWS)))
        assert no.value.diagnostics[0].help
