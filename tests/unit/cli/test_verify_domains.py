"""`kcdsl verify --domains`: linear bounds decide goals that intervals and affine forms do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kcdsl_certs.recheck import recheck

NETWORK = """\
from torch import nn


class Network(nn.Module):
    limits = (8, 64)

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 12)
        parts = (nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12))
        more = (nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12))
        self.feed = nn.Sequential(*parts, *more)

    def forward(self, ids):
        return self.feed(self.embedding(ids))

    def blocks(self):
        return {"mlp_0": self.feed}


def build(config):
    return Network()
"""
CONTRACT = """\
kcdsl: 1
contract: example
version: 1.0.0
model: {checkpoint: model.safetensors, module: "feeding:build"}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager}}
  infer: {run: torch.eager, numerics: {preset: torch-eager, compute: bfloat16, casts: any}}
data: prompts.jsonl
slices: {all: {}}
clauses:
  N-0: {require: "%s", level: L2}
"""
BALL = "forall x in ball(all, 0.05): "
RADII = ("0.005", "0.02", "0.05")


@dataclass(frozen=True)
class Done:
    """Exit code, the goal of the JSON, and the cases of its proof if it holds."""

    code: int
    goal: dict[str, Any]
    cases: list[dict[str, Any]]


Run = Callable[..., Done]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a network of four linears and two ReLUs with a prompt, without a contract."""
    made = tmp_path_factory.mktemp("feeding")
    generator = torch.Generator().manual_seed(3)

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    state = {"embedding.weight": torch.randn(8, 12, generator=generator)}
    for k, (outputs, inputs) in {0: (24, 12), 2: (12, 24), 3: (24, 12), 5: (12, 24)}.items():
        state[f"feed.{k}.weight"] = weights(outputs, inputs)
        state[f"feed.{k}.bias"] = weights(outputs) / 4
    save_file(state, made / "model.safetensors")
    (made / "feeding.py").write_text(NETWORK)
    (made / "prompts.jsonl").write_text('{"id": "a", "tokens": [0, 5]}\n')
    return made


@pytest.fixture
def run(folder: Path, tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that verifies a requirement."""
    monkeypatch.syspath_prepend(str(folder))

    def verify(requirement: str, *options: str, casts: str = "any") -> Done:
        path = folder / "contract.yaml"
        path.write_text(CONTRACT.replace("casts: any", f"casts: {casts}") % requirement)
        out = tmp_path / "out"
        ran = cli(
            *(
                "verify",
                str(path),
                "--format=json",
                "--attack",
                "off",
                "--cache",
                "off",
                "--jobs",
                "1",
            ),
            "--allow-code",
            *("-o", str(out), *options),
        )
        assert ran.code in (0, 3), ran.stderr
        (goal,) = json.loads(ran.stdout)["goals"]
        proved: list[Any] = []
        for file in out.glob("*.json"):
            document = json.loads(file.read_text())
            if ran.code == 0 and document.get("schema") == "kcdsl.interval-proof/2":
                assert recheck(file.read_bytes(), folder / "model.safetensors").ok
                proved = document["cases"]
        return Done(ran.code, goal, proved)

    return verify


def limit(run: Run, kind: str, domains: str) -> float:
    """Return the bound of a functional by these domains."""
    done = run(f"{BALL}{kind}(drift(mlp_0, x)) <= 1e-30", "--domains", domains)
    assert done.code == 3
    return float(done.goal["bound"])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["norm_inf", "norm_2", "span"])
def test_linear_bounds_hold_where_other_domains_do_not(run: Run, kind: str) -> None:
    others, planes = limit(run, kind, "interval,affine"), limit(run, kind, "planes")
    assert planes < 0.5 * others
    require = f"{BALL}{kind}(drift(mlp_0, x)) <= {(planes + others) / 2!r}"
    done = run(require)
    assert (done.code, done.goal["evidence"]["confirmed"]) == (0, True)
    assert [case["domain"] for case in done.cases] == ["planes"]
    done = run(require, "--domains", "affine,interval")
    assert (done.code, done.cases) == (3, [])


@pytest.mark.full
def test_cheapest_domain_that_holds_is_used(run: Run) -> None:
    require = f"{BALL}norm_inf(drift(mlp_0, x)) <= {limit(run, 'norm_inf', 'interval') * 1.01!r}"
    done = run(require)
    assert done.code == 0
    assert "domain" not in done.cases[0]
    done = run(require, "--domains", "planes")
    assert (done.code, done.cases[0]["domain"]) == (0, "planes")


@pytest.mark.full
def test_boxes_of_linear_bounds_and_affine_forms_are_intersected(run: Run) -> None:
    """With casts to nearest and a small box, each domain is tighter in some elements."""
    require = "forall x in ball(all, 0.0012): norm_inf(drift(mlp_0, x)) <= %r"

    def found(domains: str) -> float:
        done = run(require % 1e-30, "--domains", domains, casts="nearest")
        return float(done.goal["bound"])

    planes, met = found("planes"), found("interval,affine,planes")
    assert met < planes < found("interval,affine")
    done = run(require % ((met + planes) / 2), casts="nearest")
    assert done.code == 0
    assert done.cases[0]["domain"] == "affine+planes"
    assert {"passes", "planes"} <= set(done.cases[0])


@pytest.mark.full
def test_no_flip_by_linear_bounds(run: Run) -> None:
    """Linear bounds prove every order that other domains prove, and more."""
    require = "forall x in ball(all, %s): no_flip(mlp_0, x, 1)"
    held = {
        domains: {r for r in RADII if run(require % r, "--domains", domains).code == 0}
        for domains in ("interval,affine", "planes")
    }
    assert held["interval,affine"] < held["planes"]
    (radius, *_) = held["planes"] - held["interval,affine"]
    assert run(require % radius).cases[0]["domain"] == "planes"


@pytest.mark.full
def test_linear_bounds_refuse_unsupported_regions(run: Run) -> None:
    done = run("forall x in rows(all, 4): norm_inf(drift(mlp_0, x)) <= 10", "--domains", "planes")
    assert (done.code, done.cases) == (3, [])
    assert "none of the tried domains has a bound" in json.dumps(done.goal)
    require = f"{BALL}norm_inf(drift(mlp_0, x)) <= 10"
    done = run(require, "--domains", "planes", "--weights", "1e-4")
    assert (done.code, done.cases) == (3, [])
    done = run(require, "--weights", "1e-4")
    assert done.code == 0
    assert "planes" not in done.cases[0].get("domain", "interval")


@pytest.mark.full
def test_linear_bounds_of_large_blocks_run_only_on_request(
    run: Run, folder: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    others, planes = limit(run, "norm_inf", "interval,affine"), limit(run, "norm_inf", "planes")
    require = f"{BALL}norm_inf(drift(mlp_0, x)) <= {(planes + others) / 2!r}"
    monkeypatch.setattr("kcdsl_backends.drift.linear_bounds.MOST", 1000)
    assert run(require).code == 3
    ran = cli(
        *("verify", str(folder / "contract.yaml"), "--attack", "off", "--cache", "off"),
        "--allow-code",
    )
    assert ran.code == 3
    assert "--domains interval,affine,planes" in ran.stdout + ran.stderr
    assert run(require, "--domains", "interval,affine,planes").code == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--domains", "interval,plane"), "did you mean `planes`?"),
        (("--domains", "zonotopes"), "domains: interval, affine, planes"),
        (("--domains", ""), "domains: interval, affine, planes"),
        (("--domains", "affine,affine"), "twice"),
        (("--domains", "planes", "--chain"), "or --chain"),
    ],
)
def test_invalid_domains_are_refused(
    folder: Path, cli: Any, options: tuple[str, ...], says: str
) -> None:
    path = folder / "refused.yaml"
    path.write_text(CONTRACT % f"{BALL}norm_inf(drift(mlp_0, x)) <= 1")
    ran = cli("verify", str(path), "--allow-code", *options)
    assert ran.code == 2
    assert "KC476" in ran.stderr
    assert says in ran.stderr


ENDING = """\
from torch import nn


class Network(nn.Module):
    limits = (8, 64)
    encoder_only = ENCODER

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.feed = nn.Linear(4, 8)

    def forward(self, ids):
        return self.feed(self.embedding(ids))

    def hidden(self, ids):
        return self.embedding(ids)


def build(config):
    return Network()
"""
BOTH = """\
kcdsl: 1
contract: example
version: 1.0.0
model: {checkpoint: model.safetensors, module: "ending:build"}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager}}
  infer: {run: torch.eager, numerics: {preset: torch-eager, compute: bfloat16, casts: any}}
data: prompts.jsonl
slices: {all: {}}
clauses:
  N-0: {require: "forall x in points(all): norm_inf(drift(model, x)) <= 1", level: L2}
  N-1: {require: "max(jeffreys) <= 100", slices: [all], level: L2}
"""


@pytest.mark.parametrize("encoder", [False, True])
def test_nothing_is_implied_of_states(cli: Any, tmp_path: Path, encoder: bool) -> None:
    """The output of an encoder is no logits, so no divergence follows from its drift."""
    (tmp_path / "ending.py").write_text(ENDING.replace("ENCODER", str(encoder)))
    generator = torch.Generator().manual_seed(1)
    shapes = {"embedding.weight": (8, 4), "feed.weight": (8, 4), "feed.bias": (8,)}
    state = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "tokens": [1, 2, 3]}\n')
    (tmp_path / "contract.yaml").write_text(BOTH)
    given = ("--allow-code", "--attack", "off", "--format", "json", "-o", str(tmp_path / "out"))
    ran = cli("verify", str(tmp_path / "contract.yaml"), *given)
    assert ran.code == 0, ran.stderr
    assert len(json.loads(ran.stdout)["implied"]) == (0 if encoder else 1)
    assert json.loads(ran.stdout)["not_implied"] == []
    demanded = BOTH.replace("jeffreys", "kl").replace(
        "[all], level", "[all], evidence: proof, level"
    )
    (tmp_path / "contract.yaml").write_text(demanded)
    ran = cli("verify", str(tmp_path / "contract.yaml"), *given)
    assert ran.code == (3 if encoder else 0), ran.stderr
    missing = [{"clause": "N-1", "slice": "all"}] if encoder else []
    assert json.loads(ran.stdout)["not_implied"] == missing
