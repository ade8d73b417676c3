"""Which nodes belong to an attention that is written out, found by dataflow from each softmax.

Those of a call of `scaled_dot_product_attention` have their roles from that call.
"""

from __future__ import annotations

from dataclasses import replace

from kcdsl.model.drafts import Draft, Drafts

BETWEEN = frozenset({"scale", "divide", "shift", "add", "sub", "mul", "neg", "tanh", "cast"})
FIXED = frozenset({"constant", "param"})


def mark_attention(drafts: Drafts) -> None:
    """Set the roles of every softmax(q·kᵀ …)·v; a softmax without both products gets none."""
    for name in [n.name for n in drafts.nodes.values() if n.op == "softmax" and not n.role]:
        scores = _scores(drafts, name)
        context = _context(drafts, name)
        if scores and context:
            _mark(drafts, scores, "scores")
            _mark(drafts, [name], "probabilities")
            _mark(drafts, context, "context")


def _mark(drafts: Drafts, names: list[str], role: str) -> None:
    for name in names:
        drafts.nodes[name] = replace(drafts.nodes[name], role=role)


def _scores(drafts: Drafts, softmax: str) -> list[str]:
    """Return the product of two activations before a softmax and everything between them."""
    path: list[str] = []
    name = drafts.nodes[softmax].inputs[0]
    while True:
        node = drafts.nodes[name]
        path.append(name)
        if node.op == "matmul":
            return path
        moving = [i for i in node.inputs if drafts.nodes[i].op not in FIXED]
        if not (node.op in BETWEEN or _keeps_all(node)) or len(moving) != 1:
            return []
        name = moving[0]


def _context(drafts: Drafts, softmax: str) -> list[str]:
    """Return the products with the values: those with the probabilities on the left.

    Empty where the probabilities, apart from changes of layout, are read by anything else.
    """
    found: list[str] = []
    waiting = [softmax]
    while waiting:
        name = waiting.pop()
        if name == drafts.output:
            return []
        for user in drafts.users(name):
            if _keeps_all(user):
                waiting.append(user.name)
            elif _multiplies_values(user, name):
                found.append(user.name)
            else:
                return []
    return found


def _keeps_all(node: Draft) -> bool:
    return node.op == "view" and "ranges" not in node.attrs


def _multiplies_values(user: Draft, probabilities: str) -> bool:
    return user.op == "matmul" and user.inputs[0] == probabilities != user.inputs[1]
