"""Fields of kernels: folders and servers, and messages about values and sampling."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kcdsl.check.compile import analyse
from kcdsl.check.stored import load_bytes
from kcdsl.diagnostics import codes
from kcdsl.diagnostics.codes import Code
from kcdsl.diagnostics.model import Diagnostic, Refusal, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.canonical import digest, document
from kcdsl.ir.kernels import LogProbabilities, Service
from kcdsl.ir.terms import Program
from kcdsl.model.fingerprint import kernel_fingerprint
from kcdsl.model.presets import resolve

CONTRACT = """\
kcdsl: 1
contract: example
version: 1.0.0
model: {{checkpoint: model.safetensors, architecture: llama}}
data: requests.jsonl
kernels:
  train: {{{train}}}
  infer: {{{infer}}}
constants: {{temperature: {temperature}}}
slices: {{all: {{}}}}
clauses: {{A: {{require: mean(k3) <= 1e-3, level: L1}}}}
"""
URL = 'run: server, url: "http://10.0.0.1:8000"'
RAW = "logprobs: {values: raw}"


def analysed(
    infer: str, train: str = "run: torch.eager", temperature: str = "1"
) -> tuple[Program | None, list[Diagnostic], str]:
    text = CONTRACT.format(infer=infer, train=train, temperature=temperature)
    sink = Sink()
    return analyse(SourceFile("contract.yaml", text), sink).program, list(sink), text


def test_server_fields_survive_compilation_and_storage() -> None:
    program, found, _ = analysed(
        f"{URL}, model: large, key: KCDSL_SERVER_KEY, tokens: 48, concurrency: 8, "
        "logprobs: {values: processed, temperature: 0.7, top_p: 0.9, top_k: 50, min_p: 0.01,"
        " top: 8}",
        temperature="0.7",
    )
    assert found == []
    assert program is not None
    service = program.infer.service
    assert service is not None
    assert (service.url, service.model, service.key) == (
        "http://10.0.0.1:8000", "large", "KCDSL_SERVER_KEY",
    )  # fmt: skip
    assert (service.tokens, service.logprobs.top, service.logprobs.top_k) == (48, 8, 50)
    assert service.concurrency == 8
    again = load_bytes(document(program))
    assert again == program
    assert digest(again) == digest(program)


def test_defaults_of_server_fields_equal_the_page() -> None:
    program, _, _ = analysed(f"{URL}, {RAW}")
    assert program is not None
    assert program.infer.service == Service("http://10.0.0.1:8000", LogProbabilities("raw"))
    assert program.infer.service.tokens == 32
    assert program.infer.service.logprobs.top == 5


@pytest.mark.parametrize("url", ["http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_server_address_excludes_the_v1_suffix(url: str) -> None:
    program, _, _ = analysed(f'run: server, url: "{url}", {RAW}')
    assert program is not None
    assert program.infer.service is not None
    assert program.infer.service.url == "http://h:1"


def test_every_field_of_a_server_is_bound_by_digest_and_fingerprint() -> None:
    """The one exception is the name of the variable with the key."""
    plain = f"{URL}, tokens: 16, logprobs: {{values: processed, temperature: 1}}"
    changed = (
        plain.replace("10.0.0.1", "10.0.0.2"),
        plain.replace("tokens: 16", "tokens: 17"),
        plain.replace("tokens: 16", "tokens: 16, model: m"),
        plain.replace("tokens: 16", "tokens: 16, concurrency: 2"),
        plain.replace("processed", "raw"),
        *(plain.replace("temperature: 1", more) for more in ("top_p: 0.5", "top_k: 3", "top: 2")),
        plain.replace("temperature: 1", "min_p: 0.1"),
    )
    programs = [analysed(text)[0] for text in (plain, *changed)]
    assert None not in programs
    digests = {digest(program) for program in programs if program is not None}
    records = {str(kernel_fingerprint(p.infer)) for p in programs if p is not None}
    assert len(digests) == len(records) == len(programs)
    keyed = analysed(plain.replace("tokens: 16", "tokens: 16, key: KCDSL_SERVER_KEY_K"))[0]
    assert keyed is not None
    assert str(kernel_fingerprint(keyed.infer)) in records


@pytest.mark.full
def test_folder_is_bound_by_digest() -> None:
    one, other = (analysed(f"run: hf.transformers, folder: {name}")[0] for name in ("a", "b"))
    assert one is not None
    assert other is not None
    assert one.infer.folder == "a"
    assert digest(one) != digest(other)
    assert kernel_fingerprint(one.infer)["folder"] == "a"
    assert load_bytes(document(one)) == one


BAD: dict[str, tuple[str, Code, str]] = {
    "no address": (f"run: server, {RAW}", codes.MISSING_FIELD, "server"),
    "no values": (URL, codes.MISSING_FIELD, "server"),
    "no kind of values": (f"{URL}, logprobs: {{top: 3}}", codes.MISSING_FIELD, "top"),
    "misspelt values": (f"{URL}, logprobs: {{values: row}}", codes.NOT_ALLOWED, "row"),
    "unknown field": (
        f"{URL}, logprobs: {{values: raw, topp: 1}}", codes.UNKNOWN_FIELD, "topp",
    ),
    "no number": (
        f"{URL}, logprobs: {{values: processed, top_p: most}}", codes.WRONG_KIND, "most",
    ),
    "a truth value": (
        f"{URL}, logprobs: {{values: processed, top_k: true}}", codes.WRONG_KIND, "true",
    ),
    "half a token": (f"{URL}, tokens: 1.5, {RAW}", codes.OUT_OF_RANGE, "1.5"),
    "no token": (f"{URL}, tokens: 0, {RAW}", codes.OUT_OF_RANGE, "0"),
    "no prompt": (f"{URL}, concurrency: 0, {RAW}", codes.OUT_OF_RANGE, "0"),
    "too many prompts": (f"{URL}, concurrency: 1025, {RAW}", codes.OUT_OF_RANGE, "1025"),
    "top_p of 0": (
        f"{URL}, logprobs: {{values: processed, top_p: 0}}", codes.OUT_OF_RANGE, "0",
    ),
    "a negative temperature": (
        f"{URL}, logprobs: {{values: processed, temperature: -1}}", codes.OUT_OF_RANGE, "-1",
    ),
    "another scheme": (f'run: server, url: "ftp://h", {RAW}', codes.SERVER_ADDRESS, '"ftp://h"'),
    "no host": (f'run: server, url: "http://", {RAW}', codes.SERVER_ADDRESS, '"http://"'),
    "a password": (
        f'run: server, url: "https://me:secret@h", {RAW}', codes.SERVER_ADDRESS,
        '"https://me:secret@h"',
    ),
    "a key in the address": (
        f'run: server, url: "http://h/?key=secret", {RAW}', codes.SERVER_ADDRESS,
        '"http://h/?key=secret"',
    ),
    "a variable of another program": (
        f"{URL}, key: CLOUD_SECRET, {RAW}", codes.NOT_ALLOWED, "CLOUD_SECRET",
    ),
    "the password of the signing key": (
        f"{URL}, key: KCDSL_KEY_PASSWORD, {RAW}", codes.NOT_ALLOWED, "KCDSL_KEY_PASSWORD",
    ),
    "a key instead of its variable": (
        f'{URL}, key: "sk-secret", {RAW}', codes.NOT_ALLOWED, '"sk-secret"',
    ),
    "greedy": (
        f"{URL}, logprobs: {{values: processed, temperature: 0}}", codes.NO_SAMPLES, "0",
    ),
    "greedy by top_k": (
        f"{URL}, logprobs: {{values: processed, top_k: 1}}", codes.NO_SAMPLES, "1",
    ),
    "raw and tempered": (
        f"{URL}, logprobs: {{values: raw, temperature: 0.7}}", codes.NO_SAMPLES, "0.7",
    ),
    "raw and cut off": (
        f"{URL}, logprobs: {{values: raw, top_p: 0.9}}", codes.NO_SAMPLES, "0.9",
    ),
    "two temperatures": (
        f"{URL}, logprobs: {{values: processed, temperature: 0.7}}", codes.TWO_TEMPERATURES, "0.7",
    ),
    "an address of another adapter": (
        'run: torch.sdpa, url: "http://h"', codes.FOREIGN_KERNEL_FIELD, "url",
    ),
    "a folder of another adapter": (
        "run: torch.sdpa, folder: a", codes.FOREIGN_KERNEL_FIELD, "folder",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors_have_a_code_and_a_position(name: str) -> None:
    infer, code, at = BAD[name]
    program, found, text = analysed(infer)
    assert program is None
    first = next(d for d in found if d.code is code)
    assert first.span is not None
    assert text[first.span.start : first.span.end].endswith(at)
    assert first.help


@pytest.mark.parametrize("name", ["a password", "a key in the address", "a key instead of its v"])
def test_secret_is_not_printed(name: str) -> None:
    infer = next(value[0] for key, value in BAD.items() if key.startswith(name))
    _, found, _ = analysed(infer)
    said = [f"{d.message} {d.help}" for d in found]
    assert said
    assert not any("secret" in text for text in said)


def test_server_cannot_be_the_training_kernel() -> None:
    program, found, _ = analysed("run: torch.sdpa", train=f"{URL}, {RAW}")
    assert program is None
    assert [d.code for d in found] == [codes.NOT_ALLOWED]
    assert "training kernel" in found[0].message


def test_server_has_no_default_numerics() -> None:
    program, _, _ = analysed(f"{URL}, {RAW}")
    assert program is not None
    assert not program.infer.claims
    assert kernel_fingerprint(program.infer)["numerics"] is None
    with pytest.raises(Refusal) as caught:
        resolve(program.infer)
    assert caught.value.diagnostics[0].code is codes.NUMERICS
    stated, found, _ = analysed(f"{URL}, {RAW}, numerics: {{preset: flash-attention-2}}")
    assert found == []
    assert stated is not None
    assert resolve(stated.infer).compute == "bfloat16"


def test_numerics_of_a_server_are_checked_where_they_are_stated() -> None:
    _, found, _ = analysed(f"{URL}, {RAW}, numerics: {{preset: torch-eagre}}")
    assert [d.code for d in found] == [codes.NUMERICS]


def test_compiling_needs_neither_httpx_nor_transformers(tmp_path: object) -> None:
    script = (
        "import sys\n"
        "sys.modules['httpx'] = sys.modules['transformers'] = None\n"
        "from tests.unit.check.test_kernel_fields import analysed, URL, RAW\n"
        "assert analysed(f'{URL}, {RAW}')[0] is not None\n"
        "assert analysed('run: hf.transformers, folder: a')[0] is not None\n"
        "assert 'torch' not in sys.modules\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
