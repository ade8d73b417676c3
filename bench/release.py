"""Certificates and companions in other verifiers, their mutants, costs, and registers.

    make bench-release
    python -m bench.release --mutants 50000

Every row of the table is a run: a verifier of another project, its version, the form of the
document, and the answers to the honest document and to one by another key. `make tools` installs
the verifiers. bench/release_mutants.py tries changed documents and registers, and
bench/release_register.py measures registers. Seconds of costs are processor time of the process.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench import release_mutants, release_register
from bench.common import Better, Figure, report, show_in
from bench.release_mutants import HEAD
from kcdsl.release.register import Register
from kcdsl_certs.signatures import SigningKey, bundle_bytes, generate, pae, sign
from kcdsl_certs.statement import build_manifest
from tests.support import verifiers
from tests.support.release_scenes import Released, form_of, released
from tests.support.vectors.golden import KEY_A
from tests.support.verifiers import Answer

COLD = 0.35
"""Limit of the seconds of a cold check without hashing."""
HASHED = 1 << 30
"""Bytes hashed for the hashing figure."""
PAGE = "how-to/pipelines.md"
"""The page with the table."""


@dataclass(frozen=True, slots=True)
class Row:
    """One verifier and one form: its answers to the honest document and to another one.

    `known` is the answer of a verifier that is known to reject the form.
    """

    verifier: str
    form: str
    honest: bool
    other: bool
    detail: str = ""
    against: str = "by another key"
    known: str = ""

    @property
    def outcome(self) -> str:
        """Return the outcome in words."""
        if self.honest and not self.other:
            return f"accepted; {self.against} rejected"
        return f"rejected: {self.detail}" if not self.honest else f"ACCEPTED {self.against}"

    @property
    def is_odd(self) -> bool:
        """Return whether the answers are neither acceptance of the honest document alone nor a
        known rejection."""
        if self.known:
            return self.honest or self.other or self.known not in self.detail
        return self.other or not self.honest


def rows(made: Released) -> Iterator[Row]:
    """Run every verifier on every form that it supports."""
    version = verifiers.versions()
    other = generate()
    node = f"@sigstore/verify {version['@sigstore/verify']}"
    for path, key in made.bundles:
        answers = verifiers.sigstore_js((k.public.pem, path.read_bytes()) for k in (key, other))
        yield _row(node, path, answers)
    signed = _signed_head()
    honest, wrong = verifiers.sigstore_js((k.public.pem, signed) for k in (KEY_A, other))
    yield Row(node, HEAD, honest.accepted, wrong.accepted, honest.detail)
    yield _two_signatures(node, made)
    python = f"sigstore {version['sigstore']} (PyPI), its bundle"
    for path, _ in made.bundles[:3]:
        said = verifiers.sigstore_python(path)
        known = "expected certificate in bundle"
        yield Row(python, form_of(path), False, False, said, known=known)
    yield from _envelopes(made, other, version)
    yield from _policies(made, version)
    yield from _manifests(made, version)


def _signed_head() -> bytes:
    with (
        tempfile.TemporaryDirectory() as place,
        Register.open(Path(place) / "register.db", create=True) as register,
    ):
        return register.sign_head([KEY_A])


def _two_signatures(node: str, made: Released) -> Row:
    """Try a bundle of two keys; the same statement signed by one of them is accepted."""
    statement, key = b'{"_type":"https://in-toto.io/Statement/v1"}', made.keys[0]
    by_one, by_two = (
        bundle_bytes(sign(statement, keys), key.public.hint) for keys in ([key], made.keys)
    )
    one, two = verifiers.sigstore_js([(key.public.pem, by_one), (key.public.pem, by_two)])
    if not one.accepted:
        raise RuntimeError(f"{node} rejects a bundle with one signature: {one.detail}")
    form = "bundle with two signatures"
    return Row(node, form, two.accepted, False, two.detail, known="invalid bundle")


def _envelopes(made: Released, other: SigningKey, version: Mapping[str, str]) -> Iterator[Row]:
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


def _policies(made: Released, named: Mapping[str, str]) -> Iterator[Row]:
    honest, failed = made.folder / "honest.json", made.folder / "failed.json"
    statement = made.image_statement
    honest.write_text(json.dumps(statement))
    statement["predicate"]["verdict"] = "FAILED"
    failed.write_text(json.dumps(statement))
    both, policy = [honest, failed], made.policy("rego")
    denied = "it denies every statement"
    engines = (
        (f"regorus {named['hobofan-regorus']}", "Rego", verifiers.rego(policy, both), ""),
        (f"rego-cpp {named['regopy']}", "Rego", verifiers.rego_cpp(policy, both), denied),
        ("CUE 0.4.0", "CUE", verifiers.cue(made.policy("cue"), both), ""),
    )
    for engine, language, (one, two), known in engines:
        form = f"{language} policy, image statement"
        against = "with verdict FAILED"
        yield Row(engine, form, one.accepted, two.accepted, known, against, known)


def _manifests(made: Released, version: Mapping[str, str]) -> Iterator[Row]:
    """Compare the digest of a checkpoint with that of model signing, before and after a change of
    a file."""
    folder = made.folder / "sharded"
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "model-1.safetensors", "model-2.safetensors"):
        (folder / name).write_bytes(name.encode())
    stated = build_manifest(folder).root_digest
    honest = verifiers.model_manifest(folder)["root"] == stated
    (folder / "model-2.safetensors").write_bytes(b"changed")
    other = verifiers.model_manifest(folder)["root"] == stated
    against = "with a changed file"
    name = f"model-signing {version['model-signing']} (PyPI)"
    yield Row(name, "manifest of a checkpoint, method files", honest, other, against=against)


def _row(verifier: str, path: Path, answers: Sequence[Answer]) -> Row:
    honest, other = answers
    return Row(verifier, form_of(path), honest.accepted, other.accepted, honest.detail)


def table(found: Sequence[Row]) -> str:
    """Return rows as a Markdown table."""
    lines = ["| verifier | form | outcome |", "|---|---|---|"]
    lines += (f"| {row.verifier} | {row.form} | {row.outcome} |" for row in found)
    return "\n".join(lines) + "\n"


# --- costs ----------------------------------------------------------------------------------------


def cold(made: Released, repeat: int = 7) -> dict[str, float]:
    """Return processor seconds of a check as a process and of a bare interpreter."""
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
    """Return bytes per processor second of a manifest, relative to openssl."""
    path = folder / "weights.safetensors"
    _filled(path, HASHED)
    ratios = []
    for _ in range(3):
        start = time.process_time()
        build_manifest(path)
        own = time.process_time() - start
        theirs = _processor(["openssl", "dgst", "-sha256", str(path)], folder, 1)
        ratios.append(theirs / own)
    path.unlink()
    return median(ratios)


def scaling(folder: Path) -> float:
    """Return bytes per wall second with one file per core, relative to one file; the best of three
    rounds, because other work may use cores."""
    place, cores = folder / "shards", len(os.sched_getaffinity(0))
    place.mkdir()
    for number in range(cores):
        _filled(place / f"{number}.bin", HASHED // 4)
    ratios = []
    for _ in range(3):
        start = time.perf_counter()
        build_manifest(place / "0.bin")
        middle = time.perf_counter()
        build_manifest(place)
        ratios.append(cores * (middle - start) / (time.perf_counter() - middle))
    shutil.rmtree(place)
    return max(ratios)


def _filled(path: Path, size: int) -> None:
    block = random.Random(0).randbytes(1 << 20)
    with path.open("wb") as stream:
        for _ in range(size >> 20):
            stream.write(block)


def main() -> int:
    """Print the table, try mutants, measure; return 1 if a row or figure is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    release_mutants.add_options(parser)
    release_register.add_options(parser)
    parser.add_argument("--write", action="store_true", help="put the table into the manual")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kcdsl-release-") as place:
        made = released(Path(place))
        found = list(dict.fromkeys(rows(made)))
        print(table(found), flush=True)
        if options.write:
            show_in(PAGE, "release", table(found))
        mutants = release_mutants.figures(made, options)
        costs = cold(made)
        share, faster = hashing(Path(place)), scaling(Path(place))
    beside = "processor time, median of 7 processes, beside `python -I -c ''`"
    shards = f"files of {HASHED >> 22} MiB, wall time, {len(os.sched_getaffinity(0))} cores"
    start = costs.pop("python")
    figures = [
        Figure(
            "rows that are not as documented", sum(row.is_odd for row in found), Better.LOWER, 0
        ),
        *mutants,
        *(Figure(f"{n}, cold, s", s - start, Better.LOWER, COLD, beside) for n, s in costs.items()),
        Figure("hashing, share of openssl", share, Better.HIGHER, 0.8, "1 GiB, one core"),
        Figure("hashing, a file for each core, against one", faster, Better.HIGHER, None, shards),
        *release_register.figures(options),
    ]
    return report("release", figures)


if __name__ == "__main__":
    sys.exit(main())
