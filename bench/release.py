"""Certificates and companions in other verifiers; mutants of them; costs; registers.

    make bench-release
    python -m bench.release --mutants 50000

Every row of the table was run: a verifier of another project, its version, the form that it was
given, and what it said of the honest document and of one by another key. `make tools` installs the
verifiers. A mutant is a changed bundle or envelope that nobody signed again; one that a verifier
accepts with another payload is a wrong acceptance. Seconds are processor time of the process.
bench/release_register.py measures registers.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

from bench import release_register
from bench.common import Better, Figure, report
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import strict_base64
from kcdsl_certs.signatures import SigningKey, decode, generate, pae, parse_bundle
from kcdsl_certs.statement import build_manifest
from tests.support import verifiers
from tests.support.mutation.changes import changes
from tests.support.release_scenes import Released, released
from tests.support.verifiers import Answer

COLD = 0.35
"""Seconds that a cold check may take beside hashing."""
HASHED = 1 << 30
"""Bytes that the hashing figure reads."""
PORTION = 2_000


@dataclass(frozen=True, slots=True)
class Row:
    """One verifier and one form: what it said of the honest document and of another one."""

    verifier: str
    form: str
    honest: bool
    other: bool
    detail: str = ""
    against: str = "by another key"

    @property
    def outcome(self) -> str:
        """Return the outcome in words."""
        if self.honest and not self.other:
            return f"accepted; {self.against} rejected"
        return f"rejected: {self.detail}" if not self.honest else f"ACCEPTED {self.against}"


def rows(made: Released) -> Iterator[Row]:
    """Give every form to every verifier that reads it."""
    version = verifiers.versions()
    other = generate()
    node = f"@sigstore/verify {version['@sigstore/verify']}"
    for path, key in made.bundles:
        answers = verifiers.sigstore_js((k.public.pem, path.read_bytes()) for k in (key, other))
        yield _row(node, path, answers)
    python = f"sigstore {version['sigstore']} (PyPI), its bundle"
    for path, _ in made.bundles[:2]:
        yield Row(python, _form(path), False, False, verifiers.sigstore_python(path))
    keys = {}
    for name, pair in (("right", made.keys[0]), ("wrong", other)):
        keys[name] = made.folder / f"{name}.pub"
        keys[name].write_bytes(pair.public.pem)
    own = [path for path, key in made.envelopes if key is made.keys[0]]
    for library, words in (("sigstore", ", its DSSE"), ("securesystemslib", "")):
        right = verifiers.dsse_by(library, keys["right"], own)
        wrong = verifiers.dsse_by(library, keys["wrong"], own)
        for path, answers in zip(own, map(list, zip(right, wrong, strict=True)), strict=True):
            yield _row(f"{library} {version[library]} (PyPI){words}", path, answers)
    for path in own:
        envelope = json.loads(path.read_bytes())
        message = pae(envelope["payloadType"], base64.b64decode(envelope["payload"]))
        signature = base64.b64decode(envelope["signatures"][0]["sig"])
        said = [
            Answer(verifiers.openssl(k.public.pem, signature, message))
            for k in (made.keys[0], other)
        ]
        yield _row(f"openssl {version['openssl']}, over the signed bytes", path, said)
    yield from _policies(made, version)


def _policies(made: Released, named: Mapping[str, str]) -> Iterator[Row]:
    honest, failed = made.folder / "honest.json", made.folder / "failed.json"
    statement = made.image_statement
    honest.write_text(json.dumps(statement))
    statement["predicate"]["verdict"] = "FAILED"
    failed.write_text(json.dumps(statement))
    rego = verifiers.rego(made.policy("rego"), [honest, failed])
    cue = verifiers.cue(made.policy("cue"), [honest, failed])
    engines = ((f"regorus {named['hobofan-regorus']}", "Rego", rego), ("CUE 0.4.0", "CUE", cue))
    for engine, language, (one, two) in engines:
        form = f"{language} policy, image statement"
        yield Row(engine, form, one.accepted, two.accepted, against="with verdict FAILED")


def _row(verifier: str, path: Path, answers: Sequence[Answer]) -> Row:
    honest, other = answers
    return Row(verifier, _form(path), honest.accepted, other.accepted, honest.detail)


def _form(path: Path) -> str:
    if path.name.endswith(".cert.json"):
        return "certificate, Sigstore bundle v0.3"
    for ending, form in (
        (".image.sigstore.json", "image statement, Sigstore bundle v0.3"),
        (".svr.sigstore.json", "SVR v0.2, Sigstore bundle v0.3"),
        (".image.att", "image statement, DSSE envelope"),
        (".vsa.json", "SLSA VSA v1, DSSE envelope"),
    ):
        if path.name.endswith(ending):
            return form
    raise ValueError(path.name)


# --- mutants --------------------------------------------------------------------------------------


def mutants(data: bytes, rng: random.Random) -> Iterator[bytes]:
    """Yield changed documents for ever: bytes flipped, cut, dropped, doubled; fields changed."""
    document = json.loads(data)
    every = list(changes(document, {}))
    envelope = document.get("dsseEnvelope", document)
    statement = json.loads(base64.b64decode(envelope["payload"]))
    of_statement = list(changes(statement, {}))
    while True:
        at, bit = rng.randrange(len(data)), rng.randrange(8)
        match rng.choice(("flip", "cut", "drop", "double", "field", "field", "payload")):
            case "flip":
                made = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            case "cut":
                made = data[:at]
            case "drop":
                made = data[:at] + data[at + 1 :]
            case "double":
                made = data[: at + 1] + data[at:]
            case "payload":
                changed = rng.choice(of_statement).of(statement)
                text = json.dumps(changed, ensure_ascii=False, separators=(",", ":"))
                payload = base64.b64encode(text.encode("utf-8", "surrogatepass"))
                made = data.replace(envelope["payload"].encode(), payload)
            case _:
                made = json.dumps(rng.choice(every).of(document)).encode("utf-8", "surrogatepass")
        if made != data:
            yield made


def ours(cases: Sequence[tuple[SigningKey, bytes]]) -> list[Answer]:
    """Verify bundles with the reader and the signatures of kcdsl."""
    found = []
    for key, bundle in cases:
        try:
            envelope = decode(parse_bundle(bundle))
        except Rejected:
            found.append(Answer(False))
            continue
        message = pae(envelope.payload_type, envelope.payload)
        accepted = any(key.public.verifies(s.value, message) for s in envelope.signatures)
        found.append(Answer(accepted, envelope.payload))
    return found


Reader = Callable[[Sequence[tuple[SigningKey, bytes]]], list[Answer]]


def _by(read: Callable[[list[tuple[bytes, bytes]]], list[Answer]]) -> Reader:
    return lambda cases: read([(key.public.pem, data) for key, data in cases])


def campaign(made: Released, count: int, seed: int) -> tuple[dict[str, int], list[str]]:
    """Try mutants of every form in every verifier that reads it; return counts and wrong ones."""
    tried: dict[str, int] = {}
    wrong: list[str] = []
    bundles: tuple[tuple[str, Reader], ...] = (
        ("kcdsl", ours),
        ("@sigstore/verify", _by(verifiers.sigstore_js)),
    )
    plain: tuple[tuple[str, Reader], ...] = (("sigstore (PyPI)", _by(verifiers.sigstore_dsse)),)
    forms = [
        *((path, key, bundles) for path, key in made.bundles[:3]),
        *((path, key, plain) for path, key in made.envelopes[:2]),
    ]
    for path, key, readers in forms:
        data = path.read_bytes()
        honest = json.loads(data)
        payload = strict_base64(honest.get("dsseEnvelope", honest)["payload"])
        rng = random.Random(f"{path.suffixes} {seed}")
        left = count // len(forms)
        source = mutants(data, rng)
        while left > 0:
            cases = [(key, one) for one in islice(source, min(PORTION, left))]
            left -= len(cases)
            tried[_form(path)] = tried.get(_form(path), 0) + len(cases)
            for name, read in readers:
                for (_, mutant), answer in zip(cases, read(cases), strict=True):
                    if answer.accepted and answer.payload != payload:
                        wrong.append(f"{name}: {_form(path)}: {mutant[:200]!r}")
    return tried, wrong


# --- costs ----------------------------------------------------------------------------------------


def cold(made: Released, repeat: int = 7) -> dict[str, float]:
    """Return processor seconds of a check as a process, and those of an interpreter alone."""
    kcdsl = Path(sys.executable).with_name("kcdsl")
    check = ["check", str(made.certificate), "--key", "one.key.pub"]
    expected = made.folder / "expected.json"
    words = {
        "python": [sys.executable, "-I", "-c", ""],
        "kcdsl check": [str(kcdsl), *check],
        "python -m kcdsl_certs check": [
            *(sys.executable, "-I", "-m", "kcdsl_certs", *check),
            *("--expect", str(expected), "--checkpoint", "model.safetensors"),
        ],
    }
    subprocess.run([kcdsl, *check, "--write-expectation", expected], cwd=made.folder, check=True,
                   capture_output=True)  # fmt: skip
    return {name: _processor(command, made.folder, repeat) for name, command in words.items()}


def _processor(command: Sequence[str], folder: Path, repeat: int) -> float:
    found = []
    for _ in range(repeat):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return median(found)


def hashing(folder: Path) -> float:
    """Return bytes for each processor second of a manifest, divided by those of openssl."""
    path = folder / "weights.safetensors"
    with path.open("wb") as stream:
        block = random.Random(0).randbytes(1 << 20)
        for _ in range(HASHED >> 20):
            stream.write(block)
    ratios = []
    for _ in range(3):
        start = time.process_time()
        build_manifest(path)
        own = time.process_time() - start
        theirs = _processor(["openssl", "dgst", "-sha256", str(path)], folder, 1)
        ratios.append(theirs / own)
    path.unlink()
    return median(ratios)


def main() -> int:
    """Print the table, try mutants, measure; 1 where a row or a figure is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mutants", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    release_register.add_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kcdsl-release-") as place:
        made = released(Path(place))
        found = list(dict.fromkeys(rows(made)))
        print("| verifier | form | outcome |\n|---|---|---|")
        for row in found:
            print(f"| {row.verifier} | {row.form} | {row.outcome} |")
        tried, wrong = campaign(made, options.mutants, options.seed)
        for form, number in tried.items():
            print(f"{form}: {number} mutants")
        for one in wrong:
            print(f"WRONG: {one}")
        costs = cold(made)
        share = hashing(Path(place))
    beside = "processor time, median of 7 processes, beside `python -I -c ''`"
    start = costs.pop("python")
    figures = [
        Figure("rows that are not as documented", sum(map(_odd, found)), Better.LOWER, 0),
        Figure("mutants", sum(tried.values()), Better.HIGHER, options.mutants * 0.99),
        Figure("wrong acceptances", len(wrong), Better.LOWER, 0),
        *(Figure(f"{n}, cold, s", s - start, Better.LOWER, COLD, beside) for n, s in costs.items()),
        Figure("hashing, share of openssl", share, Better.HIGHER, 0.8, "1 GiB, one core"),
        *release_register.figures(options),
    ]
    return report("release", figures)


def _odd(row: Row) -> bool:
    """Say whether a row is neither an acceptance of the honest document alone nor the documented
    rejection: `sigstore` of PyPI reads no bundle with a key."""
    if row.honest:
        return row.other
    return "expected certificate in bundle" not in row.detail


if __name__ == "__main__":
    sys.exit(main())
