"""A real server of llama.cpp against the training kernel, with the same weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from kcdsl.diagnostics import Refusal, codes
from kcdsl_backends.empirical.collection.servers import ServerRollouts, gather_rollouts
from kcdsl_backends.empirical.diagnoses.recorded import Recorded, recorded_prechecks
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel
from kcdsl_backends.empirical.sources.rollouts.record import Semantics
from kcdsl_backends.requests import Request
from tests.conftest import Cli
from tests.servers.conftest import Loader
from tests.support.llama_cpp import llama_cpp_server, write_gguf

pytestmark = pytest.mark.usefixtures("shared_files")

FLOAT_NOISE = 1e-4
"""The largest difference of log-probabilities of two float32 programs of this model, about 1e-5."""


def largest(found: ServerRollouts) -> float:
    """Return the largest |ln w| of all sampled tokens."""
    ratios = [r.delta() for r in found.rollouts.values()]
    assert all(ratio is not None for ratio in ratios)
    return max(float(np.abs(ratio).max()) for ratio in ratios if ratio is not None)


@pytest.mark.full
@pytest.mark.parametrize(
    ("values", "temperature"), [("raw", "1"), ("processed", "1"), ("processed", "7/10")]
)
def test_log_probabilities_agree_with_the_training_kernel(
    llama_cpp: str,
    load: Loader,
    train: TorchKernel,
    requests: tuple[Request, ...],
    values: str,
    temperature: str,
) -> None:
    server = load(llama_cpp, values, temperature=temperature)
    found = gather_rollouts(server, train, requests, seed=3)
    assert not found.failures
    assert largest(found) < FLOAT_NOISE
    for rollout in found.rollouts.values():
        assert len(rollout.tokens) == 16
        assert rollout.train is not None
        assert rollout.infer is not None
        assert rollout.train.top is not None
        assert rollout.infer.top is not None
        both = zip(rollout.infer.top.ids, rollout.train.top.ids, strict=True)
        assert all(set(theirs) <= set(ours) for theirs, ours in both)
        assert rollout.infer.top.ids.shape == (16, 5)
        gaps = rollout.infer.top.logs[:, 0] - rollout.train.top.logs[:, 0]
        assert float(np.abs(gaps).max()) < FLOAT_NOISE


@pytest.mark.full
def test_concurrent_prompts_give_equal_values_up_to_rounding(
    llama_cpp: str, load: Loader, train: TorchKernel, requests: tuple[Request, ...]
) -> None:
    """Batching may change the order of sums; samples stay with their request."""
    one = gather_rollouts(load(llama_cpp), train, requests, seed=3)
    two = gather_rollouts(load(llama_cpp, concurrency=2), train, requests, seed=3)
    assert not one.failures
    assert not two.failures
    assert list(two.rollouts) == [request.key for request in requests]
    assert largest(two) < FLOAT_NOISE
    texts = [[found.rollouts[r.key].tokens for r in requests] for found in (one, two)]
    assert texts[0] == texts[1]


def test_seed_determines_the_sampled_text(
    llama_cpp: str, load: Loader, requests: tuple[Request, ...]
) -> None:
    server = load(llama_cpp)
    prompt = requests[0].tokens
    texts = {seed: server.draw(prompt, seed).tokens for seed in (1, 2, 3)}
    assert server.draw(prompt, 1).tokens == texts[1]
    assert len(set(texts.values())) > 1


def test_server_reports_its_model(llama_cpp: str, load: Loader) -> None:
    server = load(llama_cpp)
    record = server.fingerprint()
    assert record["numerics"] is None
    assert record["server"]["kind"] == "llama.cpp"
    assert record["server"]["n_params"] == 227_808
    assert record["server"]["ftype"] == "all F32"
    assert record["service"]["url"] == llama_cpp
    server.check_unchanged()


def test_unknown_model_is_refused(llama_cpp: str, load: Loader) -> None:
    with pytest.raises(Refusal) as caught:
        load(llama_cpp, name="another")
    assert caught.value.diagnostics[0].code is codes.SERVER_CHANGED
    assert "tiny" in caught.value.diagnostics[0].message


@pytest.mark.full
def test_server_truncates_the_distribution_as_requested(
    llama_cpp: str, load: Loader, train: TorchKernel, requests: tuple[Request, ...]
) -> None:
    """Every |ln w| is then the truncated mass: positive for infer, never for train."""
    server = load(llama_cpp, top_k=4)
    found = gather_rollouts(server, train, requests, seed=3)
    ratios = np.concatenate([r.delta() for r in found.rollouts.values()])
    assert float(ratios.max()) < FLOAT_NOISE
    assert float(ratios.min()) < -1e-3
    semantics = Semantics("processed")
    checks = recorded_prechecks(
        Recorded(
            tuple(found.rollouts.values()), 1.0, {"all": 8}, semantics, server.semantics,
            found.policies, True,
        )
    )  # fmt: skip
    named = {check.name: check for check in checks}
    assert named["logprob_semantics"].outcome == "failed"
    assert named["logprob_semantics"].blocking
    assert "top_k 4" in named["logprob_semantics"].detail


def test_api_key_is_required_and_never_printed(
    gguf_file: Path,
    load: Loader,
    requests: tuple[Request, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = "a-key-that-nobody-may-see"
    with llama_cpp_server(gguf_file, secret) as url:
        with pytest.raises(Refusal) as caught:
            load(url)
        assert "status 401" in caught.value.diagnostics[0].message
        monkeypatch.setenv("KCDSL_SERVER_KEY_TEST", "a-wrong-key")
        with pytest.raises(Refusal) as caught:
            load(url, key="KCDSL_SERVER_KEY_TEST")
        assert "a-wrong-key" not in str(caught.value.diagnostics)
        monkeypatch.setenv("KCDSL_SERVER_KEY_TEST", secret)
        server = load(url, key="KCDSL_SERVER_KEY_TEST")
        assert len(server.draw(requests[0].tokens, 1).tokens) == 16
        assert secret not in json.dumps(server.fingerprint())
        assert secret not in repr(server)


CONTRACT = """\
kcdsl: 1
contract: served
version: 1.0.0
model: {{checkpoint: {folder}/model.safetensors, architecture: llama}}
data: prompts.jsonl
kernels:
  train: {{run: torch.eager}}
  infer: {{run: server, url: "{url}", tokens: 12, logprobs: {{{logprobs}}}}}
constants: {{temperature: {temperature}}}
slices: {{all: {{}}}}
clauses:
  N-K3: {{require: mean(k3) <= 1e-3, level: L2}}
  N-RATIO: {{require: mean(abs(log_ratio)) <= 1e-2, level: L2}}
  N-TV: {{require: p90(tv_is) <= 1e-2, level: L2}}
  S-TOP: {{require: mean(top1_overlap) >= 90%, level: L2}}
"""


def verdicts(
    cli: Cli, folder: Path, tiny_folder: Path, text: str
) -> tuple[int, dict[str, str], str]:
    """Evaluate a contract; return the exit code, the verdict of each clause, and the output.

    Seeds depend on names of requests, so the prompts are beside the contract: samples do not depend
    on the place of the repository.
    """
    shutil.copy(tiny_folder / "prompts.jsonl", folder)
    (folder / "contract.yaml").write_text(text, "utf-8")
    ran = cli("evaluate", "contract.yaml", "-o", "out", cwd=folder)
    report = folder / "out" / "report.json"
    if not report.is_file():
        return ran.code, {}, ran.stdout + ran.stderr
    found = json.loads(report.read_text("utf-8"))
    rows = {row["clause"]: row["verdict"] for row in found["clauses"]}
    return ran.code, rows, ran.stdout + ran.stderr


@pytest.mark.full
def test_contract_is_decided_on_sampled_tokens(
    llama_cpp: str, tiny_folder: Path, cli: Cli, tmp_path: Path, follows: Callable[..., None]
) -> None:
    text = CONTRACT.format(
        folder=tiny_folder, url=llama_cpp, logprobs="values: processed, temperature: 0.8",
        temperature=0.8,
    )  # fmt: skip
    code, rows, printed = verdicts(cli, tmp_path, tiny_folder, text)
    assert rows == dict.fromkeys(("N-K3", "N-RATIO", "N-TV", "S-TOP"), "held"), printed
    assert code == 0
    kinds = {
        row["evidence"] for row in json.loads((tmp_path / "out/report.json").read_text())["clauses"]
    }
    assert kinds == {"sample"}, "a server draws: no row of it is a census"
    line = json.loads((tmp_path / "out/trace.jsonl").read_text("utf-8").splitlines()[0])
    drawn = {"temperature": 0.8, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    assert line["sampling_params"] == drawn
    follows(line)
    ran = cli("replay", "out/trace.parquet", cwd=tmp_path)
    assert ran.code == 0, ran.stdout + ran.stderr


@pytest.mark.full
def test_end_of_text_token_is_sampled_with_a_value(
    tiny_folder: Path, load: Loader, train: TorchKernel, requests: tuple[Request, ...],
    tmp_path: Path,
) -> None:  # fmt: skip
    """Texts end with a full stop here; the sampled one has a value too."""
    end = ord(".")
    with llama_cpp_server(write_gguf(tiny_folder, tmp_path / "ends.gguf", end)) as url:
        server = load(url, tokens=40)
        server = replace(server, vocabulary=replace(server.vocabulary, ends=frozenset({end})))
        found = gather_rollouts(server, train, requests, seed=3)
    assert not found.failures
    texts = [rollout.tokens for rollout in found.rollouts.values()]
    short = [tokens for tokens in texts if len(tokens) < 40]
    assert short
    assert all(tokens[-1] == end for tokens in short)
    assert all(end not in tokens[:-1] for tokens in texts)
    assert largest(found) < FLOAT_NOISE


@pytest.mark.full
def test_changed_rope_base_is_a_violation(tiny_folder: Path, cli: Cli, tmp_path: Path) -> None:
    """The weights are equal, but the base of RoPE differs."""
    path = write_gguf(tiny_folder, tmp_path / "other.gguf", rope_theta=500.0)
    with llama_cpp_server(path) as url:
        text = CONTRACT.format(folder=tiny_folder, url=url, logprobs="values: raw", temperature=1)
        code, rows, printed = verdicts(cli, tmp_path, tiny_folder, text)
    assert code != 0
    assert rows["N-K3"] == "violated", printed
    assert "held" not in rows.values(), printed


def test_contract_with_another_temperature_does_not_compile(
    llama_cpp: str, tiny_folder: Path, cli: Cli, tmp_path: Path
) -> None:
    text = CONTRACT.format(
        folder=tiny_folder, url=llama_cpp, logprobs="values: processed, temperature: 0.8",
        temperature=1,
    )  # fmt: skip
    code, rows, printed = verdicts(cli, tmp_path, tiny_folder, text)
    assert code != 0
    assert not rows
    assert codes.TWO_TEMPERATURES.id in printed


@pytest.mark.parametrize(
    ("clause", "words"),
    [("p99(kl) <= 0.1", "`kl` of tier A"), ("peak_memory <= 1 GiB", "`peak_memory` of tier E")],
)
def test_metrics_beyond_the_tier_of_servers_are_refused_by_name(
    llama_cpp: str, tiny_folder: Path, cli: Cli, tmp_path: Path, clause: str, words: str
) -> None:
    text = CONTRACT.format(folder=tiny_folder, url=llama_cpp, logprobs="values: raw", temperature=1)
    text = text.replace("mean(k3) <= 1e-3", clause)
    code, rows, printed = verdicts(cli, tmp_path, tiny_folder, text)
    assert code != 0
    assert not rows
    assert codes.METRIC_OUT_OF_REACH.id in printed
    assert words in " ".join(printed.split())


def test_exact_fractions_reach_the_server_as_numbers(llama_cpp: str, load: Loader) -> None:
    server = load(llama_cpp, temperature="4/5", top_p=Fraction(19, 20), min_p=Fraction(1, 50))
    assert server.semantics == Semantics("processed", 0.8, 0.95, 0, 0.02)
