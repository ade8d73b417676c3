"""The page of one certificate: `kcdsl show --html`."""

from __future__ import annotations

from collections.abc import Iterator

from kcdsl.verdict.html.document import Part, Sheet, SheetCell, document_page
from kcdsl.verdict.model import SIGNS
from kcdsl.verdict.quantities import UNREACHED
from kcdsl.verdict.studies.certificate_view import CertificateView, Content, ResultView

_STATED = {
    "PASSED": ("held", "✓ passed"),
    "FAILED": ("violated", "✗ failed"),
    "INCONCLUSIVE": ("inconclusive", "? inconclusive"),
}
_OUTCOMES = {"ok": "held", "failed": "violated", "not_run": "none"}


def certificate_page(view: CertificateView) -> str:
    """Return the page of a view: signers at the top, then the expected result of a check."""
    colour, headline = view.headline
    content = view.content
    parts: list[Part | None] = []
    facts: list[tuple[str, str]] = []
    about: list[str] = []
    if content is not None:
        parts += _claims(content)
    parts += [_gate(view), _signatures(view)]
    if content is not None:
        parts += _rest(view, content)
        about = [f"stage {content.stage}", f"checkpoint {content.checkpoint['name']}"]
        if content.verdict is not None:
            facts.append(("states", content.verdict))
        facts.append(("validity", content.validity.state))
    return document_page(
        Sheet(
            title=_title(view),
            headline=headline,
            colour=colour,
            sign=SIGNS[colour],
            parts=[part for part in parts if part is not None],
            about=about,
            facts=facts,
            foot=f"read at {view.moment}; files beside the certificate were not read",
        )
    )


def _title(view: CertificateView) -> str:
    if view.content is None:
        return view.file
    contract = view.content.contract
    return f"{contract['id']} {contract['version']}"


def _gate(view: CertificateView) -> Part:
    _, words = view.gate
    rows = [
        [
            SheetCell(step["name"]),
            SheetCell(step["outcome"].replace("_", " "), colour=_OUTCOMES[step["outcome"]]),
            SheetCell(step["detail"], step["reason"]),
        ]
        for step in view.steps
    ]
    lead = f"The steps that need no other file than the certificate: {words}."
    lines = tuple(text for _, text in view.gate_lines)
    return Part("What a check says", lead, head=("step", "outcome", ""), rows=rows, lines=lines)


def _signatures(view: CertificateView) -> Part | None:
    rows = [
        [
            SheetCell(s.keyid or UNREACHED),
            SheetCell(s.key or UNREACHED, s.sha256 or ""),
            SheetCell("counts", colour="held")
            if s.trusted
            else SheetCell(s.problem, colour="inconclusive"),
        ]
        for s in view.signatures
    ]
    if not rows:
        return None
    lead = "The key that a signature names is a hint; the key that made it was found by the policy."
    return Part("Signatures", lead, head=("named key", "trusted key", ""), rows=rows)


def _claims(content: Content) -> Iterator[Part]:
    if content.results:
        lead = "Ratio: how far the certified bound is above the value that a concrete run attained."
        head = ("clause", "claim", "decides", "attained", "ratio", "rests on", "stated")
        rows = [_result(result) for result in content.results]
        yield Part("Claims", lead, head=head, rows=rows)
    over = [f"{_where(item)} is transferred" for item in content.carried]
    over += [f"{_where(item)} is not transferred: {item['detail']}" for item in content.left]
    if over:
        yield Part("Transferred", lines=over)


def _rest(view: CertificateView, content: Content) -> Iterator[Part]:
    yield Part("Numerics", "What both kernels claim to compute.", (), *_numerics(content))
    for title, lead, lines in (
        ("Assumptions", "Signed by the issuer, and verified by no step.", content.assumptions),
        ("Not claimed", "", content.non_claims),
        (
            "Accepted findings",
            "Findings about the contract that a comment in it accepts.",
            tuple(f"{s['code']}: {s['reason']}" for s in content.suppressions),
        ),
    ):
        if lines:
            yield Part(title, lead, lines=lines)
    files = [(f["role"], f["path"], f["sha256"]) for f in content.files]
    files += [("proof", r.proof, "") for r in content.results if r.proof is not None]
    files += [("input", name, digest) for name, digest in content.inputs.items()]
    if files:
        rows = [
            [SheetCell(role), SheetCell(name), SheetCell(digest)] for role, name, digest in files
        ]
        lead = "Named by digest; none of them was read."
        yield Part("Files", lead, head=("role", "name", "sha256"), rows=rows)
    yield Part("Identity", pairs=list(_facts(view, content)))
    for role, name in (("train", "Training kernel"), ("infer", "Inference kernel")):
        yield Part(name, pairs=list(content.kernels[role].build.items()) or [("build", UNREACHED)])


def _where(item: object) -> str:
    assert isinstance(item, dict)
    return str(item["id"]) if "slice" not in item else f"{item['id']} on {item['slice']}"


def _result(result: ResultView) -> list[SheetCell]:
    colour, word = _STATED[result.verdict]
    ratio = UNREACHED if result.tightness is None else f"{result.tightness:.3g}"
    return [
        SheetCell(result.clause, result.slice or ""),
        SheetCell(result.claim, result.reason or ""),
        SheetCell(result.decisive, number=True),
        SheetCell(result.number("attained"), number=True),
        SheetCell(ratio, number=True),
        SheetCell(result.rests_on, result.method),
        SheetCell(word, colour=colour),
    ]


def _numerics(content: Content) -> tuple[tuple[str, ...], list[list[SheetCell]], tuple[str, ...]]:
    train, infer = (content.kernels[role].numerics for role in ("train", "infer"))
    rows = []
    for name in dict.fromkeys((*train, *infer)):
        one, other = (side.get(name, UNREACHED) for side in (train, infer))
        rows.append(
            [
                SheetCell(name),
                SheetCell(one),
                SheetCell(other, colour="" if one == other else "inconclusive"),
            ]
        )
    lines = () if rows else ("Neither kernel states its numerics.",)
    return ("field", "training", "inference"), rows, lines


def _facts(view: CertificateView, content: Content) -> Iterator[tuple[str, str]]:
    window, contract, checkpoint = content.validity, content.contract, content.checkpoint
    yield "certificate", f"sha256:{view.identity}"
    yield "subject", f"sha256:{content.subject}"
    yield "contract", f"{contract['id']} {contract['version']} sha256:{contract['digest']}"
    if contract["source"] is not None:
        yield "contract text", f"sha256:{contract['source']}"
    yield "checkpoint", f"{checkpoint['name']} sha256:{checkpoint['digest']}"
    for role, digest in checkpoint["companions"].items():
        yield str(role), f"sha256:{digest}"
    for role, name in (("train", "training kernel"), ("infer", "inference kernel")):
        yield name, f"{content.kernels[role].name} sha256:{content.kernels[role].digest}"
    yield "stage", content.stage
    left = "" if window.days_left is None else f", {window.days_left} days left"
    yield "valid", f"from {window.issued_at} until {window.valid_until}: {window.state}{left}"
    yield "sequence", str(content.sequence)
    if content.supersedes is not None:
        yield "supersedes", f"sha256:{content.supersedes}"
    if content.earlier is not None:
        yield "earlier certificate", f"{content.earlier['path']} sha256:{content.earlier['digest']}"
    yield "evaluator", f"{content.evaluator['id']} {content.evaluator['version']}"
    if content.complete is not None:
        covers = "the whole contract" if content.complete else ", ".join(content.covers)
        yield "covers", covers
    if view.trust is not None:
        trust = view.trust
        named = trust["policy"]["file"] if trust["policy"] else "keys named by --key; no policy"
        yield "trust", f"{named}: {trust['threshold']} of {len(trust['keys'])} key(s) must sign"
