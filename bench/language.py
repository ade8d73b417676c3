"""Cold and warm speed of the front end, compared with a bare interpreter and a compiled peer.

Cold start: whole processes, run alternately so that noise affects all equally, and compared as
ratios of medians. The peer is `vehicle typecheck` (PyPI vehicle-lang) of a small specification,
installed in a separate environment. Scale: a contract of 10,000 lines and 2,000 clauses, linted in
a process, and checked again after edits of one clause as in the language server.

    make bench-language
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from statistics import median

from bench.common import Better, Figure, report
from kcdsl.check.incremental import Incremental
from kcdsl.diagnostics.spans import SourceFile

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "tiny_lm" / "contract.yaml"
PEER = ROOT / ".venv-vehicle"
PEER_VERSION = "0.28.0"
SPECIFICATION = """\
type InputVector = Tensor Real [2]
type OutputVector = Tensor Real [1]

@network
f : InputVector -> OutputVector

bounded : InputVector -> Bool
bounded x = forall i . 0 <= x ! i <= 1

@property
small : Bool
small = forall x . bounded x => f x ! 0 <= 1
"""
ROUNDS = 21
CLAUSES = 2_000
EDITS = 15
HEAVY = ("torch", "numpy", "z3", "onnx", "scipy")


def main() -> int:
    """Measure everything and report."""
    with tempfile.TemporaryDirectory() as folder:
        return report("language", [*_cold(Path(folder)), *_scale(Path(folder)), _heavy_modules()])


def _cold(folder: Path) -> list[Figure]:
    specification = folder / "small.vcl"
    specification.write_text(SPECIFICATION, encoding="utf-8")
    commands = {
        "bare": [sys.executable, "-c", "pass"],
        "lint": [str(Path(sys.executable).with_name("kcdsl")), "lint", str(EXAMPLE)],
        "peer": [str(_peer()), "typecheck", "-s", str(specification)],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(ROUNDS + 1):
        for name, words in commands.items():
            taken = _process(words, folder)
            if turn:
                times[name].append(taken)
    bare, lint, peer = (median(times[name]) for name in ("bare", "lint", "peer"))
    conditions = f"medians of {ROUNDS} processes each, in turns; {EXAMPLE.relative_to(ROOT)}"
    return [
        Figure("bare interpreter, ms", 1e3 * bare, Better.LOWER, None, conditions),
        Figure("cold kcdsl lint, ms", 1e3 * lint, Better.LOWER, None, conditions),
        Figure("cold vehicle typecheck, ms", 1e3 * peer, Better.LOWER, None, conditions),
        Figure("cold lint / bare interpreter", lint / bare, Better.LOWER, 20, conditions),
        Figure("cold lint / vehicle typecheck", lint / peer, Better.LOWER, 1.3, conditions),
    ]


def _process(words: list[str], folder: Path) -> float:
    start = time.perf_counter()
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    taken = time.perf_counter() - start
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)} failed: {done.stdout}{done.stderr}")
    return taken


def _peer() -> Path:
    """Return the peer's program; install it on first use."""
    program = PEER / "bin" / "vehicle"
    if not program.exists():
        print(f"installing vehicle-lang {PEER_VERSION} into {PEER.name}", file=sys.stderr)
        venv.create(PEER, with_pip=True)
        words = ["-m", "pip", "--disable-pip-version-check", "-qq", "install"]
        subprocess.run(
            [str(PEER / "bin" / "python"), *words, f"vehicle-lang=={PEER_VERSION}"], check=True
        )
    return program


def large_contract() -> str:
    """Return a contract of 2,000 clauses on 10,000 lines, of every common form."""
    head = EXAMPLE.read_text(encoding="utf-8").split("clauses:")[0]
    lines = ["clauses:"]
    for i in range(CLAUSES):
        requirement = (
            f'"forall x in ball(short, 1e-3): norm_inf(drift(attn_{i % 12}, x)) <= 0.0{i % 9 + 1}"',
            f"p99(kl) <= 0.{i % 90 + 10} nats",
            f"mean(top1_overlap) >= 9{i % 9}.5%",
            f"p95(latency) <= {i + 1} ms",
        )[i % 4]
        lines += [f"  C-{i}:", f"    require: {requirement}", "    level: L2", "    # reason"]
        lines.append("    evidence: proof" if i % 4 == 0 else "    then: guard")
    return head + "\n".join(lines) + "\n"


def _scale(folder: Path) -> list[Figure]:
    text = large_contract()
    path = folder / "large.kc.yaml"
    path.write_text(text, encoding="utf-8")
    command = [str(Path(sys.executable).with_name("kcdsl")), "lint", str(path)]
    cold = median(_process(command, folder) for _ in range(5))
    conditions = f"{text.count(chr(10)):,} lines, {CLAUSES:,} clauses"
    return [
        Figure("lint of a large contract, s", cold, Better.LOWER, 1.5, f"{conditions}, process"),
        Figure("again after an edit, ms", 1e3 * _edited(text), Better.LOWER, 100, conditions),
        Figure(
            "again in the server, ms",
            1e3 * _served(text),
            Better.LOWER,
            100,
            f"{conditions}, from the change to the answer over the protocol",
        ),
    ]


def _edited(text: str) -> float:
    """Return the median time to check again after an edit of one clause, in seconds."""
    incremental = Incremental()
    incremental.analyse(SourceFile("large.kc.yaml", text))
    times = []
    for i in range(EDITS):
        clause = 1 + 4 * (i * 37 % (CLAUSES // 4))
        wanted = 1 - i % 2
        old = f"  C-{clause}:\n    require: p99(kl)"
        new = f"  C-{clause}:\n    require: p99(k{'lx' * wanted or 'l'})"
        assert old in text
        edited = text.replace(old, new)
        start = time.perf_counter()
        _, sink = incremental.analyse(SourceFile("large.kc.yaml", edited))
        times.append(time.perf_counter() - start)
        assert len(sink.found) == wanted
    return median(times)


def _served(text: str) -> float:
    """Return the median seconds of a real server from an edit to its diagnostics."""
    from tests.support.rpc import Client

    client = Client([str(Path(sys.executable).with_name("kcdsl")), "lsp"], cwd=ROOT)
    try:
        pulls: dict[str, object] = {"diagnostic": {"dynamicRegistration": False}}
        client.request(
            "initialize",
            {"processId": None, "rootUri": None, "capabilities": {"textDocument": pulls}},
        )
        client.notify("initialized", {})
        uri = "file:///large.kc.yaml"
        document = {"uri": uri, "languageId": "yaml", "version": 0, "text": text}
        client.notify("textDocument/didOpen", {"textDocument": document})
        asked = {"textDocument": {"uri": uri}}
        client.request("textDocument/diagnostic", asked)
        lines = text.split("\n")
        times = []
        for i in range(EDITS):
            number = lines.index(f"  C-{1 + 4 * (i * 37 % (CLAUSES // 4))}:") + 1
            at = {"line": number, "character": lines[number].index("(kl)") + 3}
            change = {"range": {"start": at, "end": at}, "text": "x"}
            start = time.perf_counter()
            changed = {"uri": uri, "version": i + 1}
            client.notify(
                "textDocument/didChange", {"textDocument": changed, "contentChanges": [change]}
            )
            answer = client.request("textDocument/diagnostic", asked)
            times.append(time.perf_counter() - start)
            errors = [d for d in answer["items"] if d["severity"] == 1]
            assert len(errors) == i + 1, errors
        return median(times)
    finally:
        client.close()


def _heavy_modules() -> Figure:
    program = (
        "import sys\nfrom kcdsl.cli import main\n"
        f"main(['lint', {str(EXAMPLE)!r}])\n"
        f"print(len([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    count = int(done.stdout.split()[-1])
    return Figure("heavy modules imported", count, Better.LOWER, 0, f"of {', '.join(HEAVY)}")


if __name__ == "__main__":
    sys.exit(main())
