"""Attacks through files in a contract's folder: modules that must not be imported, hostile files.

`attempt` carries one out in its own process and reports the outcome. This module states no expected
outcomes.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from tests.support.commands import PLAIN_TERMINAL
from tests.support.configurations import DECODER_TEXT
from tests.support.rpc import Client


class Outcome(StrEnum):
    """The outcome of an attack."""

    ACCEPTED = "accepted"
    """The command continued as if nothing were wrong."""
    REFUSED = "refused"
    """The command ended with a diagnostic."""
    EXECUTED = "executed"
    """Code of the folder ran."""
    HUNG = "hung"
    """The command did not end in time."""
    CRASHED = "crashed"
    """The command ended with a traceback, a signal or an internal error."""


@dataclass(frozen=True)
class Attempt:
    """One attack that was run; `executed` names the traps whose code ran."""

    outcome: Outcome
    code: int
    stdout: str
    stderr: str
    seconds: float
    executed: tuple[str, ...] = ()


def attempt(
    command: Sequence[str | os.PathLike[str]],
    folder: Path,
    *,
    seconds: float = 60.0,
    variables: Mapping[str, str] | None = None,
    stdin: bytes = b"",
) -> Attempt:
    """Run a command in a folder, without a terminal, and classify how it ended."""
    (folder / SPRUNG).unlink(missing_ok=True)
    outer = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    begun = time.monotonic()
    late = False
    process = subprocess.Popen(
        [os.fspath(word) for word in command],
        cwd=folder,
        env={**outer, **PLAIN_TERMINAL, **(variables or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, err = process.communicate(stdin, timeout=seconds)
    except subprocess.TimeoutExpired:
        late = True
        process.kill()
        out, err = process.communicate()
    took = time.monotonic() - begun
    stdout, stderr = out.decode("utf-8", "replace"), err.decode("utf-8", "replace")
    executed = executed_traps(folder)
    code = process.returncode
    if executed:
        outcome = Outcome.EXECUTED
    elif late:
        outcome = Outcome.HUNG
    elif code < 0 or "Traceback (most recent call last)" in stderr or "[KC999]" in stderr:
        outcome = Outcome.CRASHED
    elif code == 0:
        outcome = Outcome.ACCEPTED
    else:
        outcome = Outcome.REFUSED
    return Attempt(outcome, code, stdout, stderr, took, executed)


# --- traps ---------------------------------------------------------------------------------------

SPRUNG = "sprung.txt"
_TRAP = """\
with open({file!r}, "a") as stream:
    stream.write({name!r} + "\\n")
"""


def trap(file: Path, name: str, folder: Path) -> None:
    """Write a module that records its name in `folder` when it is imported."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(_TRAP.format(file=str(folder / SPRUNG), name=name))


def packages() -> tuple[str, ...]:
    """Return the names of all installed packages that can be imported, except kcdsl."""
    own = {"kcdsl_backends", "kcdsl_certs", "kcdsl_grammar"}
    return tuple(
        sorted(n for n in {*packages_distributions(), *own} if n.isidentifier() and n != "kcdsl")
    )


BEFORE_US = frozenset({"sitecustomize", "usercustomize", "_distutils_hack"})
"""Modules that Python imports before any program runs, also from entries of PYTHONPATH."""


def executed_traps(folder: Path) -> tuple[str, ...]:
    """Return the names of the traps whose code ran."""
    file = folder / SPRUNG
    return tuple(sorted(set(file.read_text().split()))) if file.exists() else ()


def set_traps(folder: Path, names: Iterable[str]) -> None:
    """Write a trap for each name that could be imported from the folder."""
    for name in names:
        trap(folder / f"{name}.py", name, folder)


CONTRACT = """\
kcdsl: 1
contract: hostile
version: 1.0.0
model: {checkpoint: model.safetensors, module: "trapped_model.network:build"}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: prompts.jsonl
slices: {all: {}}
clauses:
  N-GAP: {require: p99(gap) <= 0.02, slices: [all], level: L2}
  N-RISE: {require: p99(rise) <= 0.02, slices: [all], level: L2}
  N-MLP: {require: "forall x in points(all): norm_inf(drift(mlp_0, x)) <= 0.1", level: L2}
"""
_METRIC = """\
from kcdsl import metric

{trap}

@metric(family="numerical", unit="nats", better="lower", counted="token", needs=["logits"])
def {name}(train_logits, infer_logits):
    return abs(infer_logits - train_logits).max(axis=-1)
"""


def hostile_contract(folder: Path) -> None:
    """Write a contract whose model and metrics are traps, and the other inputs of commands."""
    sprung = str(folder / SPRUNG)
    (folder / "contract.yaml").write_text(CONTRACT)
    table = {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    weights = struct.pack("<Q", len(header)) + header + struct.pack("<f", 1.0)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text(DECODER_TEXT)
    (folder / "prompts.jsonl").write_text('{"id": "a", "tokens": [0, 1]}\n')
    (folder / "certificate.json").write_text("{}")
    (folder / "kcdsl.toml").write_text('metrics = ["own_metrics.py", "trapped_metrics.own"]\n')
    trap(folder / "trapped_model" / "__init__.py", "trapped_model", folder)
    trap(folder / "trapped_model" / "network.py", "trapped_model.network", folder)
    trap(folder / "trapped_metrics" / "__init__.py", "trapped_metrics", folder)
    for file, name in (("own_metrics.py", "gap"), ("trapped_metrics/own.py", "rise")):
        text = _METRIC.format(trap=_TRAP.format(file=sprung, name=file), name=name)
        (folder / file).write_text(text)
    backend = folder / "hostile-1.0.dist-info"
    backend.mkdir()
    (backend / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile\nVersion: 1.0\n")
    (backend / "entry_points.txt").write_text(
        "[kcdsl.backends]\nhostile = trapped_model:CATALOGUE\n"
        "[torch.backends]\nhostile = trapped_model:load\n"
        "[kcdsl.metrics]\nhostile = trapped_metrics.own\n"
    )


ARMED = "armed"
_DISARMED = """\
from pathlib import Path as _Path

if (_Path(__file__).parent / {armed!r}).exists():
    with (_Path(__file__).parent / {sprung!r}).open("a") as stream:
        stream.write({name!r} + "\\n")
"""
_NETWORK = """
from torch import nn, tanh


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, width)

    def forward(self, x):
        return tanh(self.up(x))


class Network(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config["vocab_size"], config["width"])
        self.block = Block(config["width"])
        self.head = nn.Linear(config["width"], config["vocab_size"])

    def forward(self, ids):
        return self.head(self.block(self.embedding(ids)))

    def blocks(self):
        return {"mlp_0": self.block}


def build(config):
    return Network(config)
"""
_GAP = """
from kcdsl import metric


@metric(family="numerical", unit="nats", better="lower", counted="token", needs=["logits"])
def gap(train_logits, infer_logits):
    return abs(infer_logits - train_logits).max(axis=-1)
"""
_USED = """\
kcdsl: 1
contract: used
version: 1.0.0
model: {checkpoint: model.safetensors, module: "network:build", config: config.json}
kernels:
  train: {run: torch.eager}
  infer: {run: torch.sdpa, numerics: {preset: torch-sdpa-flash, compute: bfloat16}}
data: prompts.jsonl
slices: {all: {}}
clauses:
  N-GAP: {require: p99(gap) <= 5, slices: [all], level: L2}
  N-MLP: {require: "forall x in points(all): norm_inf(drift(mlp_0, x)) <= 1", level: L2}
  N-TINY: {require: "forall x in points(all): norm_inf(drift(mlp_0, x)) <= 1e-9", level: L2}
"""


_REGISTER = ("--register", "releases.db")


def used_contract(folder: Path) -> None:
    """Write a contract with its own model and metric, and all documents made from it.

    Afterwards every module of the folder is replaced by a trap.
    """
    import pyarrow as pa
    from pyarrow.parquet import write_table
    from safetensors.torch import save_file
    from torch import manual_seed, rand

    folder.mkdir(parents=True)
    for name, text in (("network", _NETWORK), ("own_gap", _GAP)):
        start = _DISARMED.format(armed=ARMED, sprung=SPRUNG, name=name)
        (folder / f"{name}.py").write_text(start + text)
    manual_seed(0)
    shapes = {"embedding.weight": (8, 4), "block.up.weight": (4, 4), "block.up.bias": (4,)}
    shapes |= {"head.weight": (8, 4), "head.bias": (8,)}
    save_file(
        {key: rand(shape) - 0.5 for key, shape in shapes.items()}, folder / "model.safetensors"
    )
    size = {"vocab_size": 8, "width": 4, "max_position_embeddings": 8}
    (folder / "config.json").write_text(json.dumps(size))
    rows = [{"id": f"row-{i}", "tokens": [i, 3 * i % 8, 3, 4]} for i in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "kcdsl.toml").write_text('metrics = ["own_gap.py"]\n')
    (folder / "contract.yaml").write_text(_USED)
    table = pa.table({"request": ["row-0"] * 4, "position": [0, 1, 2, 3], "gap": [0.1] * 4})
    write_table(table, folder / "tokens.parquet")
    later = _USED.replace("1.0.0", "1.1.0").replace("torch-sdpa-flash", "torch-eager")
    (folder / "later.yaml").write_text(later.replace("torch.sdpa", "torch.eager"))
    certificates = ("out/evaluate.cert.json", "later/evaluate.cert.json")
    for words, code in (
        (("keygen", "-o", "own.key"), 0),
        (("verify", "contract.yaml", "--allow-code", "--sign", "own.key"), 1),
        (("verify", "contract.yaml", "--allow-code", "-o", "unsigned"), 1),
        (("evaluate", "contract.yaml", "--allow-code", "--sign", "own.key"), 0),
        (("evaluate", "later.yaml", "--allow-code", "--sign", "own.key", "-o", "later"), 0),
        (("register", "init", *_REGISTER), 0),
        (("register", "add", *certificates, "--key", "own.key.pub", *_REGISTER), 0),
    ):
        ran = attempt(kcdsl(*words, safe=True), folder, seconds=600)
        assert ran.code == code, ran.stderr
    set_traps(folder, packages())
    (folder / ARMED).touch()


_CHECK = ("check", "--contract", "contract.yaml", "--key", "own.key.pub")
OF_USED: Mapping[str, tuple[tuple[str, ...], int]] = {
    "compile": (("compile", "contract.yaml"), 0),
    "lint": (("lint", "--fix", "contract.yaml"), 0),
    "explain": (("explain", "N-GAP", "contract.yaml"), 0),
    "plan": (("plan", "contract.yaml", "--prior", "out/trace.parquet"), 0),
    "report": (("report", "out/report.json"), 0),
    "aggregate": (("aggregate", "tokens.parquet", "--contract", "contract.yaml"), 0),
    "status": (("status", "contract.yaml"), 1),
    "check of proofs": (
        (*_CHECK, "out/verify.cert.json", "--recheck"),
        4,
    ),
    "check of measurements": (
        (*_CHECK, "out/evaluate.cert.json", "--complete"),
        4,
    ),
    "sign": (("sign", "unsigned/verify.statement.json", "--key", "own.key"), 0),
    "replay of a run": (
        ("replay", "out/N-TINY.counterexample.json", "--contract", "contract.yaml"),
        2,
    ),
    "replay of a trace": (("replay", "out/trace.parquet", "--contract", "contract.yaml"), 0),
    "transfer": (
        ("transfer", "out/verify.cert.json", "model.safetensors", "--contract", "contract.yaml"),
        2,
    ),
    "why": (("why", "later/trace.parquet", "--contract", "contract.yaml", *_REGISTER), 2),
}
"""One run of each command that reads documents, in the folder of `used_contract`, with its exit
code: those that would run code ask first (2)."""


READING: Mapping[str, tuple[str, ...]] = {
    "init": ("init", "-o", "drafted.yaml"),
    "compile": ("compile", "--consistency", "contract.yaml"),
    "lint": ("lint", "."),
    "fmt": ("fmt", "--check", "contract.yaml"),
    "diff": ("diff", "contract.yaml", "contract.yaml"),
    "explain": ("explain", "N-GAP", "contract.yaml"),
    "plan": ("plan", "contract.yaml"),
    "report": ("report", "report.json"),
    "aggregate": ("aggregate", "table.jsonl", "--contract", "contract.yaml"),
    "status": ("status", "contract.yaml"),
    "compare": ("compare", "trace.parquet", "trace.parquet"),
    "check": ("check", "certificate.json", "--contract", "contract.yaml", "--key", "own.key.pub"),
    "keygen": ("keygen", "-o", "another.key"),
    "sign": ("sign", "certificate.json", "--key", "own.key"),
    "companions": (
        *("companions", "certificate.json", "--contract", "contract.yaml"),
        *("--key", "own.key.pub", "--sign", "own.key", "--image", f"a/b@sha256:{'0' * 64}"),
    ),
    "show": ("show", "certificate.json"),
    "fleet": ("fleet", "certificate.json", "certificate.json"),
    "register": ("register", "init", "--register", "releases.db"),
    "promote": (
        *("promote", "certificate.json", "--contract", "contract.yaml", "--stage", "offline-ci"),
        *("--register", "releases.db", "--slot", "chat", "--key", "own.key.pub"),
    ),
    "gate": (
        *("gate", "contract.yaml", "--register", "releases.db", "--slot", "chat"),
        *("--stage", "canary"),
    ),
    "attach": ("attach", "certificate.json", f"localhost:1/a/b@sha256:{'0' * 64}"),
    "doctor": ("doctor",),
    "backends": ("backends",),
    "vnnlib": ("vnnlib", "verify", "query.vnnlib", "--network", "N=N.onnx", "--timeout", "20"),
    "config": ("config", "show"),
    "completion": ("completion", "bash"),
}
"""Reading commands, with the arguments of one run of each in the folder of `hostile_contract`. The
language server is one more: see `editor_session`."""
RUNNING: Mapping[str, tuple[str, ...]] = {
    "verify": ("verify", "contract.yaml", "--cache", "off"),
    "evaluate": ("evaluate", "contract.yaml", "--seconds", "0.1"),
    "replay": ("replay", "counterexample.json", "--contract", "contract.yaml"),
    "attribute": ("attribute", "contract.yaml"),
    "experiment": ("experiment", "e1", "contract.yaml"),
    "transfer": (
        "transfer",
        "certificate.json",
        "model.safetensors",
        "--contract",
        "contract.yaml",
    ),
    "why": ("why", "trace.parquet", "--contract", "contract.yaml"),
}
"""Commands that run code of a contract with the user's permission."""

SCRIPT = "import sys; sys.argv[0] = 'kcdsl'; from kcdsl.cli import main; sys.exit(main())"


def kcdsl(*words: str, safe: bool = False) -> list[str]:
    """Return the command line `python -m kcdsl`, or with `safe` that of the program `kcdsl`."""
    start = ["-P", "-c", SCRIPT] if safe else ["-m", "kcdsl"]
    return [sys.executable, *start, *words]


def editor_session(folder: Path) -> tuple[str, ...]:
    """Run a session with the language server in a folder; return the traps whose code ran.

    The server is started there as `python -m kcdsl lsp`.
    """
    with_server(folder, (folder / "contract.yaml").read_text())
    return executed_traps(folder)


@dataclass(frozen=True)
class Session:
    """A session: processor seconds of each answer, and methods that ended in an internal error."""

    seconds: Mapping[str, float]
    errors: tuple[str, ...]


AT_A_PLACE = ("hover", "completion", "definition", "prepareRename", "references", "rename")
OF_A_DOCUMENT = ("documentSymbol", "semanticTokens/full", "codeLens", "diagnostic", "formatting")
OF_A_RANGE = ("inlayHint", "codeAction")
_INTERNAL_ERROR = -32603


def with_server(folder: Path, text: str, uri: str | None = None) -> Session:
    """Open a text in a new language server and send every request that the server supports."""
    client = Client(kcdsl("lsp"), folder)
    document = {"uri": uri or (folder / "contract.yaml").as_uri()}
    lines = text.split("\n")
    line = min(9, len(lines) - 1)
    position = {"line": line, "character": min(24, len(lines[line]))}
    whole = {"start": {"line": 0, "character": 0}, "end": {"line": len(lines), "character": 0}}
    about: dict[str, Any] = {"textDocument": document}
    settings = {"tabSize": 2, "insertSpaces": True}
    more: dict[str, dict[str, Any]] = {
        "references": {"context": {"includeDeclaration": True}},
        "rename": {"newName": "Q"},
        "formatting": {"options": settings},
        "codeAction": {"context": {"diagnostics": []}},
    }
    questions: list[tuple[str, dict[str, Any]]] = [
        *((f"textDocument/{m}", {**about, "position": position}) for m in AT_A_PLACE),
        *((f"textDocument/{m}", about) for m in OF_A_DOCUMENT),
        *((f"textDocument/{m}", {**about, "range": whole}) for m in OF_A_RANGE),
    ]
    seconds: dict[str, float] = {}
    errors: list[str] = []

    def ask(method: str, parameters: dict[str, Any] | None) -> None:
        begun = client.processor_seconds()
        try:
            client.request(method, parameters)
        except RuntimeError as error:
            if str(_INTERNAL_ERROR) in str(error):
                errors.append(method)
        seconds[method] = client.processor_seconds() - begun

    try:
        root = {"processId": None, "rootUri": folder.as_uri()}
        ask("initialize", {**root, "capabilities": {}})
        client.notify("initialized", {})
        opened = {**document, "languageId": "yaml", "version": 1, "text": text}
        begun = client.processor_seconds()
        client.notify("textDocument/didOpen", {"textDocument": opened})
        client.told("textDocument/publishDiagnostics")
        seconds["textDocument/didOpen"] = client.processor_seconds() - begun
        for method, parameters in questions:
            ask(method, {**parameters, **more.get(method.rpartition("/")[2], {})})
        ask("shutdown", None)
    finally:
        client.close()
    return Session(seconds, tuple(errors))
