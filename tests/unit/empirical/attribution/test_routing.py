"""Expert routing: recorded, replayed, and attributed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kcdsl.ir.terms import ModelRef
from kcdsl.model.architecture import Model
from kcdsl.model.loader import load_model
from kcdsl.verdict.studies.attribution import Attribution
from kcdsl_backends.empirical.attribution.hybrids import (
    Batches,
    Recorder,
    RequestBatch,
    RouterReplay,
    Unreplayable,
    equal_choices,
)
from kcdsl_backends.requests import Request
from tests.support.attributions import (
    EAGER,
    Changed,
    attributed,
    fixed_requests,
    pair_of,
    ref,
    small_model,
    subject_of,
)

NETWORK = """
import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        scores = self.router(x)
        best, chosen = torch.topk(torch.softmax(scores, -1), 2, dim=-1)
        every = torch.stack([expert(x) for expert in self.experts], -2)
        picked = every.gather(-2, chosen[..., None].expand(*chosen.shape, 8))
        return x + (best[..., None] * picked).sum(-2)


class Network(nn.Module):
    limits = (128, 64)

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(128, 8)
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.last = nn.Linear(8, 128)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)

    def blocks(self):
        return {f"experts_{i}": layer for i, layer in enumerate(self.layers)}


def build(config):
    return Network()
"""


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("experts")
    (folder / "experts_network.py").write_text(NETWORK)
    namespace: dict[str, Any] = {}
    exec(NETWORK, namespace)
    torch.manual_seed(4)
    state = {n: 3 * t.detach().clone() for n, t in namespace["build"]({}).named_parameters()}
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    where = ModelRef("model.safetensors", module="experts_network:build", config="config.json")
    return load_model(where, folder)


def shares(found: Attribution) -> dict[str, float | None]:
    return {s.name: s.share for s in found.sources}


@pytest.mark.full
def test_changed_experts_are_attributed_to_routing(experts: Model) -> None:
    pair = pair_of(experts, EAGER, ref(compute="bfloat16"))
    found = attributed(subject_of(pair, fixed_requests(24)))
    routing = next(s for s in found.sources if s.name == "routing")
    assert routing.state == "differs"
    assert {b.sources for b in found.between} == {
        (), ("precision",), ("routing",), ("precision", "routing"),
    }  # fmt: skip
    assert routing.share is not None
    assert routing.share > 0.2
    assert found.method == "shapley"


def test_unchanged_experts_have_no_routing_share(experts: Model) -> None:
    def nudged(wanted: Any, kernel: Any) -> Any:
        return kernel if wanted == EAGER else Changed(kernel, lambda z, ids: z * (1 + 1e-6))

    pair = pair_of(experts, EAGER, ref(compute="float64", accumulate="float64"), nudged)
    found = attributed(subject_of(pair, fixed_requests(24)))
    routing = next(s for s in found.sources if s.name == "routing")
    assert routing.state == "equal"
    assert routing.shapley is not None
    assert routing.shapley.value == 0.0
    assert len(found.between) == 2


def test_model_without_experts_has_no_routing_source() -> None:
    found = attributed(
        subject_of(pair_of(small_model(), EAGER, ref(compute="bfloat16")), fixed_requests(3))
    )
    routing = next(s for s in found.sources if s.name == "routing")
    assert routing.state == "absent"
    assert routing.shapley is None
    assert routing.share is None
    assert "no experts" in (routing.reason or "")


@pytest.mark.full
def test_recorded_experts_are_replayed_in_batches(experts: Model) -> None:
    pair = pair_of(experts, EAGER, ref(compute="bfloat16"))
    subject = subject_of(pair, fixed_requests(24))
    batched = attributed(
        type(subject)(pair, subject.requests, subject.plan, "kl", "lower", Batches(3, padding=True))
    )
    alone = attributed(subject)
    assert batched.method == "shapley"
    a, b = shares(alone)["routing"], shares(batched)["routing"]
    assert a is not None
    assert b is not None
    assert a == pytest.approx(b, rel=0.05)


SCORES = torch.tensor([[0.1, 0.9, 0.5], [0.7, 0.2, 0.6], [0.3, 0.1, 0.2]])


def run(scores: Tensor) -> Tensor:
    values, chosen = scores.topk(2, dim=-1)
    return values + 10 * chosen


def test_replay_uses_recorded_experts_with_current_scores() -> None:
    group = RequestBatch((3,), together=False)
    recorder = Recorder(group)
    with recorder:
        first = run(SCORES)
    ((chosen,),) = recorder.choices()
    assert chosen.tolist() == [[1, 2], [0, 2], [0, 2]]
    replay = RouterReplay(group, recorder.choices())
    with replay:
        again = run(SCORES)
    replay.finish()
    assert torch.equal(first, again)
    with RouterReplay(group, recorder.choices()):
        other = run(1 - SCORES)
    assert torch.equal(other, (1 - SCORES).gather(-1, chosen) + 10 * chosen)


def test_replay_respects_padding_in_batches() -> None:
    group = RequestBatch((3, 1), together=True)
    recorder = Recorder(group)
    both = torch.stack([SCORES, SCORES.flip(-1)])  # rows 2 and 3 of the second are padding
    with recorder:
        run(both.reshape(6, 3))  # flattened, as in some implementations
    first, second = recorder.choices()
    assert first[0].shape == (3, 2)
    assert second[0].tolist() == [[1, 0]]
    replay = RouterReplay(group, [(torch.tensor([[0, 1]] * 3),), (torch.tensor([[0, 2]]),)])
    with replay:
        _, chosen = both.topk(2, dim=-1)
    assert chosen[0].tolist() == [[0, 1]] * 3
    assert chosen[1].tolist() == [[0, 2], [2, 0], [2, 0]]


def test_replay_with_other_routers_is_refused() -> None:
    group = RequestBatch((3,), together=False)
    with pytest.raises(Unreplayable, match="more routers"), RouterReplay(group, [()]):
        run(SCORES)
    with (
        pytest.raises(Unreplayable, match="experts"),
        RouterReplay(group, [(torch.zeros(3, 1).long(),)]),
    ):
        run(SCORES)
    replay = RouterReplay(group, [(torch.zeros(3, 2).long(), torch.zeros(3, 2).long())])
    with replay:
        run(SCORES)
    with pytest.raises(Unreplayable, match="1 routers ran, and 2"):
        replay.finish()
    with pytest.raises(Unreplayable, match="rows"), Recorder(RequestBatch((4,), together=False)):
        run(SCORES)


def test_order_of_chosen_experts_does_not_matter() -> None:
    one, turned = torch.tensor([[1, 2]]), torch.tensor([[2, 1]])
    assert equal_choices([(one,)], [(turned,)])
    assert not equal_choices([(one,)], [(torch.tensor([[1, 3]]),)])
    assert not equal_choices([(one,)], [(one, one)])


def test_requests_are_batched_in_order_and_padded() -> None:
    rows = [Request(f"f:{i}", str(i), (1,) * n, {}, i) for i, n in enumerate((2, 3, 2, 2, 3))]
    padded = Batches(2, padding=True)
    assert [[r.id for r in g] for g in padded.groups(rows)] == [["0", "1"], ["2", "3"], ["4"]]
    assert padded.rows(rows[:2]) == [[1, 1, 0], [1, 1, 1]]
    assert padded.rows(rows[4:]) == [[1, 1, 1], [1, 1, 1]]
    equal_ = Batches(2, padding=False)
    assert [[r.id for r in g] for g in equal_.groups(rows)] == [["0", "2"], ["3"], ["1", "4"]]
