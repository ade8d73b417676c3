"""A time limit ends the search for bounds, and keeps the results found before."""

from __future__ import annotations

import math
import time

import pytest
import torch

from kcdsl.model.graph import BlockGraph
from kcdsl.model.presets import resolve
from kcdsl_backends.certifier.estimate import Cost, CostEstimate
from kcdsl_backends.certifier.statements.problems import ProblemFactory
from kcdsl_backends.drift.affine.error_bounds import on_row
from kcdsl_backends.process import OutOfTime, refuse_late, until
from tests.support.random_models import random_model

_CONFIG = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": 16, "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(name="factory", scope="module")
def fixture_factory(tmp_path_factory: pytest.TempPathFactory) -> ProblemFactory:
    train = resolve({"preset": "torch-eager"})
    infer = resolve({"preset": "torch-eager", "compute": "bfloat16"})
    model = random_model(_CONFIG, tmp_path_factory.mktemp("model"), 17)
    return ProblemFactory(model, train, infer, torch.device("cpu"))


def test_innermost_time_limit_applies() -> None:
    refuse_late()
    with until(time.time() - 1):
        with until(None):
            refuse_late()
        with pytest.raises(OutOfTime):
            refuse_late()
    refuse_late()


@pytest.mark.full
def test_affine_computation_ends_at_the_limit(factory: ProblemFactory) -> None:
    problem, tokens = factory.problem("attn_0", (1, 2, 3)), (1, 2, 3)
    centre = factory.centre("attn_0", tokens)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    with until(time.time() - 1), pytest.raises(OutOfTime):
        problem.forms(centre, zero).box()


@pytest.mark.full
def test_time_estimates_grow_with_tokens_and_are_reported(factory: ProblemFactory) -> None:
    graphs: list[BlockGraph] = [
        factory.problem("attn_0", tuple(range(count))).graph for count in (2, 4, 8)
    ]
    costs = [Cost.of(graph) for graph in graphs]
    operations = [cost.operations for cost in costs]
    assert operations == sorted(operations)
    assert operations[0] > 0
    assert not list(CostEstimate.of(graphs, 1, checked=True).messages())
    assert list(CostEstimate(1e4, 1e9, math.inf).messages()) == [
        "about 167 min and 1.0 GB, within a factor of 3"
    ]
    (line,) = CostEstimate(200.0, 1e9, math.inf).messages(limit=20.0)
    assert line.startswith("about 3 min within a factor of 3, and the time limit is 20 s: fewer or")
    (line,) = CostEstimate(1.0, 9e9, 4e9).messages()
    assert "9.0 GB" in line
    assert "--domains interval" in line


def test_spared_bounds_exceed_exact_ones_by_their_allowance(factory: ProblemFactory) -> None:
    problem, tokens = factory.problem("attn_0", (1, 2, 3)), (1, 2, 3)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    forms = problem.forms(factory.centre("attn_0", tokens), zero)
    run, place = forms.infer, forms.infer.computed[forms.output]
    width = forms.shape[-1]
    functionals = on_row(torch.eye(width, dtype=torch.float64), (2,), forms.shape)

    def sizes(spare: torch.Tensor | None) -> torch.Tensor:
        return run.tape.bound(place, functionals, spare=spare).magnitude(zero)

    exact, whole = sizes(None), run.tape.entries[place].error_bound[2]
    some = torch.where(torch.arange(width) % 2 == 0, 0.1 * exact, 0.0)
    assert torch.equal(sizes(torch.zeros(width, dtype=torch.float64)), exact)
    assert torch.allclose(sizes(torch.full((width,), math.inf)), whole)
    spared = sizes(some)
    assert bool((spared >= exact).all())
    assert bool((spared <= exact + 8 * some).all())
    assert bool((spared > exact).any())
    assert torch.equal(spared[1::2], exact[1::2])
