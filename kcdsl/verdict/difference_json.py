"""The difference of two contracts as JSON (`kcdsl.diff/1`)."""

from __future__ import annotations

import json
from typing import Any

from kcdsl.diagnostics.render.terminal import json_for_terminals
from kcdsl.verdict.difference import Change, ClauseDifference, Difference, Named, Witness

SCHEMA = "kcdsl.diff/1"


def difference_json(found: Difference) -> str:
    """Return the document that `kcdsl diff --format json` prints."""
    document = {
        "schema": SCHEMA,
        "old": _named(found.old),
        "new": _named(found.new),
        "relation": found.relation.value,
        "changes": [_change(change) for change in found.changes],
        "clauses": [_clause(clause) for clause in found.clauses],
    }
    return json_for_terminals(json.dumps(document, indent=2, ensure_ascii=False)) + "\n"


def _named(contract: Named) -> dict[str, str]:
    digest = f"sha256:{contract.digest}"
    return {"name": contract.name, "version": contract.version, "digest": digest}


def _clause(clause: ClauseDifference) -> dict[str, Any]:
    return {
        "id": clause.id,
        "status": clause.status.value,
        "relation": clause.relation.value,
        "old_id": clause.old_id,
        "old": clause.old_text,
        "new": clause.new_text,
        "changes": [_change(change) for change in clause.changes],
        "witness": None if clause.witness is None else _witness(clause.witness),
        "implied_by": list(clause.kept_by),
        "because": list(clause.why),
    }


def _change(change: Change) -> dict[str, Any]:
    relation = None if change.relation is None else change.relation.value
    return {"name": change.name, "old": change.old, "new": change.new, "relation": relation}


def _witness(witness: Witness) -> dict[str, Any]:
    return {
        "accepts": witness.accepts.lower(),
        "refuses": witness.refuses.lower(),
        "clause": witness.clause,
        "extent": witness.extent.value,
        "of": witness.of,
        "values": [{"what": v.what, "value": v.shown, "exact": v.exact} for v in witness.values],
        "lacking": list(witness.lacking),
        "flips": list(witness.flips),
        "request": witness.request,
    }
