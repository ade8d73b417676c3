"""Terminal output of the view of a certificate and of the difference of two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from rich.console import RenderableType
from rich.text import Text

from kcdsl.verdict.quantities import UNREACHED
from kcdsl.verdict.studies.certificate_view import CertificateView, Content, ResultView
from kcdsl.verdict.text.console import print_on, table
from kcdsl_certs.verification.report import EARLIER_FAILED

STATED = {
    "PASSED": ("✓ passed", "green"),
    "FAILED": ("✗ failed", "bold red"),
    "INCONCLUSIVE": ("? inconclusive", "yellow"),
}
"""Sign with word, and colour, of each verdict that a certificate states."""
_COLOURS = {"held": "bold green", "violated": "bold red", "inconclusive": "bold yellow"}
_OUTCOMES = {"ok": "green", "failed": "bold red", "not_run": "dim"}


def print_certificate(view: CertificateView, stream: TextIO) -> None:
    """Print a certificate: signers first, the expected result of a check last."""
    colour, words = view.headline
    print_on(stream, Text(view.file, "bold"), soft_wrap=True)
    print_on(stream, Text(words, _COLOURS[colour]))
    if view.content is None:
        print_on(stream, Text("nothing can be read of it"))
    else:
        print_on(stream, "", *_content(view, view.content))
    if view.signatures:
        rows = (
            (
                s.keyid or UNREACHED,
                s.key or UNREACHED,
                Text("✓ counts", "green") if s.trusted else Text(f"✗ {s.problem}", "yellow"),
            )
            for s in view.signatures
        )
        columns = ("named key (a hint)", "trusted key", "")
        print_on(stream, "", table(columns, rows, "signatures"))
    steps = (
        (
            step["name"],
            Text(step["outcome"].replace("_", " "), _OUTCOMES[step["outcome"]]),
            step["reason"],
            step["detail"],
        )
        for step in view.steps
        if step["reason"] != EARLIER_FAILED
    )
    heads = ("step", "outcome", "reason", "detail")
    print_on(stream, "", table(heads, steps, "steps of a check that need no other file"))
    stopped = [step["name"] for step in view.steps if step["reason"] == EARLIER_FAILED]
    if stopped:
        print_on(stream, f"not run, because a step failed: {', '.join(stopped)}")
    last = (view.gate, *view.gate_lines)
    print_on(stream, "", *(Text(words, _COLOURS[colour]) for colour, words in last))


def _content(view: CertificateView, content: Content) -> Iterator[RenderableType]:
    yield table(("", ""), _facts(view, content), show_header=False)
    if content.results:
        yield ""
        columns = ("claim", ">bound or value", ">attained", ">ratio", "rests on", "stated")
        yield table(columns, map(_row, content.results), "what is claimed")
    for item in content.carried:
        yield Text(f"transferred: {_where(item)}")
    for item in content.left:
        yield Text(f"not transferred: {_where(item)}: {item['detail']}")
    yield ""
    yield _numerics(content)
    for title, texts in (
        ("assumed, and not verified by any step", content.assumptions),
        ("not claimed", content.non_claims),
        ("accepted findings", (f"{s['code']}: {s['reason']}" for s in content.suppressions)),
    ):
        lines = [f"- {' '.join(text.split())}" for text in texts]
        if lines:
            yield ""
            yield Text(title, "italic")
            yield from map(Text, lines)
    files = [(f["role"], f["path"], f["sha256"][:16]) for f in content.files]
    files += [("proof", r.proof, "") for r in content.results if r.proof is not None]
    files += [("input", name, digest[:16]) for name, digest in content.inputs.items()]
    if files:
        yield ""
        yield table(("role", "name", "sha256"), files, "files that it names, not read")


def _where(item: object) -> str:
    assert isinstance(item, dict)
    return str(item["id"]) if "slice" not in item else f"{item['id']} [{item['slice']}]"


def _facts(view: CertificateView, content: Content) -> Iterator[tuple[str, object]]:
    contract, checkpoint, window = content.contract, content.checkpoint, content.validity
    yield "kind", content.kind
    if content.verdict is not None:
        part = "of the whole contract" if content.complete else "of a part of the contract"
        sign, style = STATED[content.verdict]
        yield "states", Text.assemble((sign, style), f", {part}")
    yield "identity", f"sha256:{view.identity}"
    yield "contract", f"{contract['id']} {contract['version']}  sha256:{contract['digest']}"
    yield "checkpoint", f"{checkpoint['name']}  sha256:{checkpoint['digest']}"
    for role, name in (("train", "training kernel"), ("infer", "inference kernel")):
        kernel = content.kernels[role]
        yield name, f"{kernel.name}  sha256:{kernel.digest}"
    yield "stage", content.stage
    left = "" if window.days_left is None else f", {window.days_left} days left"
    state = f"{window.state}{left} at {view.moment}"
    yield "valid", f"from {window.issued_at} until {window.valid_until}: {state}"
    yield "sequence", str(content.sequence)
    if content.supersedes is not None:
        yield "supersedes", f"sha256:{content.supersedes}"
    if content.earlier is not None:
        yield "earlier", f"{content.earlier['path']}  sha256:{content.earlier['digest']}"
    yield "evaluator", f"{content.evaluator['id']} {content.evaluator['version']}"


def _row(result: ResultView) -> tuple[object, ...]:
    sign, style = STATED[result.verdict]
    words = f"{result.clause}: {result.claim}"
    if result.reason is not None:
        words += f" ({result.reason})"
    return (
        words,
        result.decisive,
        result.number("attained"),
        UNREACHED if result.tightness is None else f"{result.tightness:.3g}",
        result.rests_on,
        Text(sign, style),
    )


def _numerics(content: Content) -> RenderableType:
    train, infer = (content.kernels[role].numerics for role in ("train", "infer"))
    rows = []
    for name in dict.fromkeys((*train, *infer)):
        one, other = (side.get(name, UNREACHED) for side in (train, infer))
        rows.append((name, one, Text(other, "" if one == other else "bold")))
    if not rows:
        return Text("neither kernel states its numerics")
    return table(("", "training", "inference"), rows, "numerics of the kernels")
