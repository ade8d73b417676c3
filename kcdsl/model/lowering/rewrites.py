"""Rewrites of drafts: patterns of several operations become single operations, and the nodes of
attention get their roles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kcdsl.model.graph import View
from kcdsl.model.lowering.drafts import LEAVES, OPERATIONS, UNROUNDED, DraftNode, Drafts, Rule


def masked_softmax(drafts: Drafts, node: DraftNode) -> DraftNode | None:
    """softmax(mask(scores, m)) -> softmax(scores, m); several masks are combined."""
    if node.op != "softmax" or len(node.inputs) != 1:
        return None
    scores, mask = node.inputs[0], None
    while (source := drafts.nodes[scores]).op == "mask":
        found = drafts.value(source.inputs[1])
        assert found is not None
        mask = found if mask is None else np.logical_and(mask, found)
        scores = source.inputs[0]
    if mask is None or drafts.nodes[scores].shape != node.shape:
        return None
    return replace(node, inputs=(scores, drafts.constant(np.ascontiguousarray(mask))))


def exact_casts(drafts: Drafts, node: DraftNode) -> DraftNode | None:
    """f(cast(x)) -> f(x) where the cast is exact in every kernel.

    Operations that only move elements then have the format of x.
    """
    inputs = tuple(drafts.before_casts(name) for name in node.inputs)
    if inputs == node.inputs:
        return None
    moved = node.op in UNROUNDED and len(inputs) == 1
    return replace(
        node, inputs=inputs, format=drafts.nodes[inputs[0]].format if moved else node.format
    )


def rounded_once(drafts: Drafts, node: DraftNode) -> DraftNode | None:
    """cast(f(x)) -> f(x) in the format of the cast, where nothing else reads f(x), f(x) is stored
    in the internal format of operations, and the format holds the operands of a sum or product."""
    if node.op != "cast":
        return None
    source = drafts.nodes[node.inputs[0]]
    alone = len(drafts.users(source.name)) == 1 and source.name != drafts.output
    inside = drafts.is_inside(source.format) and "form" not in source.attrs
    formats = [drafts.nodes[name].format for name in source.inputs]
    held = source.op not in _OF_TWO or all(drafts.is_wider(node.format, f) for f in formats)
    if not (source.op in ONE_ROUNDING and alone and inside and held):
        return None
    return replace(source, format=node.format)


def written_out_silu(drafts: Drafts, node: DraftNode) -> DraftNode | None:
    """Rewrite x * sigmoid(x) as silu(x)."""
    if node.op != "mul":
        return None
    for x, gate in (node.inputs, node.inputs[::-1]):
        source = drafts.nodes[gate]
        if source.op != "sigmoid" or source.inputs != (x,):
            continue
        if drafts.is_inside(source.format):
            return replace(node, op="silu", inputs=(x,))
        if source.format == node.format:
            return replace(node, op="silu", inputs=(x,), attrs={"form": "written"})
    return None


def written_out_norm(drafts: Drafts, node: DraftNode) -> DraftNode | None:
    """Rewrite x / sqrt(mean(x²) + eps) as rms_norm(x), and the same of x - mean(x) as
    layer_norm(x).

    The variance is one operation or the mean of the centred squares; `_normalised` lists the forms
    of the root.
    """
    for x, shift, roots in _normalised(drafts, node):
        inner = drafts.nodes[shift]
        if inner.op != "shift" or float(inner.attrs["offset"]) <= 0.0:
            continue
        spread = drafts.nodes[inner.inputs[0]]
        found = _root_mean_square(drafts, x, spread) or _centred_spread(drafts, x, spread)
        if found is not None:
            op, source, parts = found
            attrs: dict[str, Any] = {"eps": float(inner.attrs["offset"])}
            every = [*parts, ("shift", inner.format), *roots]
            if not all(drafts.is_inside(format) for _, format in every[:-1]):
                attrs |= {"form": "written", "parts": [list(part) for part in every]}
            return replace(node, op=op, inputs=(source,), attrs=attrs)
    return None


def norm_weight(drafts: Drafts, node: DraftNode) -> DraftNode | None:
    """rms_norm(x) * weight -> rms_norm(x, weight); written-out norms likewise, with a bias too."""
    if node.op not in ("mul", "add"):
        return None
    for norm, weight in (node.inputs, node.inputs[::-1]):
        source, factor = drafts.nodes[norm], drafts.nodes[weight]
        row = factor.op == "param" and factor.shape == source.shape[-1:]
        written = "parts" in source.attrs
        whole = written or (source.op == "rms_norm" and drafts.is_inside(source.format))
        part = "weighted" if node.op == "mul" else "biased"
        next_part = {1: "weighted", 2: "biased"}.get(len(source.inputs))
        most = 2 if source.op == "rms_norm" else 3
        if not (whole and row and part == next_part and len(source.inputs) < most):
            continue
        attrs = dict(source.attrs)
        if written:
            attrs["parts"] = [*source.attrs["parts"], [part, node.format]]
        return replace(node, op=source.op, inputs=(*source.inputs, weight), attrs=attrs)
    return None


def written_out_rope(drafts: Drafts, node: DraftNode) -> DraftNode | None:
    """Rewrite x * cos + concat(-x[h:], x[:h]) * sin as rope(x, cos, sin)."""
    if node.op != "add":
        return None
    for straight, turned in (node.inputs, node.inputs[::-1]):
        products = [drafts.nodes[straight].format, drafts.nodes[turned].format]
        fused = all(drafts.is_inside(format) for format in products)
        if not fused and products != [node.format, node.format]:
            continue
        attrs = {} if fused else {"form": "written"}
        for x, cos in _times_constant(drafts, straight):
            for rotated, sin in _times_constant(drafts, turned):
                half = node.shape[-1] // 2
                tables = all(drafts.nodes[t].shape[-1] == node.shape[-1] for t in (cos, sin))
                if tables and _is_half_turn(drafts, rotated, x, half) and _same(drafts, x, node):
                    return replace(node, op="rope", inputs=(x, cos, sin), attrs=attrs)
    return None


def joined_views(drafts: Drafts, node: DraftNode) -> DraftNode | None:
    """view(view(x)) -> view(x), where nothing else reads the first and one view expresses both."""
    source = drafts.nodes[node.inputs[0]] if node.op == "view" else node
    if source.op != "view" or source is node or source.name == drafts.output:
        return None
    view = View.of(node).after(View.of(source))
    if view is None or len(drafts.users(source.name)) != 1:
        return None
    return replace(node, inputs=source.inputs, attrs=view.attrs)


def spread_operands(drafts: Drafts) -> None:
    """Replace broadcasting in products by an explicit view, for which every domain has a rule."""
    nodes: dict[str, DraftNode] = {}
    for name, node in drafts.nodes.items():
        inputs: list[str] = []
        for source in node.inputs if node.op == "mul" else ():
            operand = drafts.nodes[source]
            if operand.shape != node.shape and operand.op not in LEAVES:
                wide = f"{name}.{len(inputs)}"
                attrs = View.expanded(operand.shape, node.shape).attrs
                nodes[wide] = replace(
                    operand, name=wide, op="view", inputs=(source,), shape=node.shape, attrs=attrs
                )
                source = wide
            inputs.append(source)
        nodes[name] = replace(node, inputs=tuple(inputs)) if inputs else node
    drafts.nodes = nodes


ONE_ROUNDING = OPERATIONS - LEAVES - UNROUNDED - {"cast"}
"""Operations whose rules cover their intermediate roundings and that of the result."""

_OF_TWO = frozenset({"add", "sub", "mul"})

RULES: tuple[Rule, ...] = (
    exact_casts,
    masked_softmax,
    written_out_silu,
    written_out_norm,
    norm_weight,
    written_out_rope,
    rounded_once,
)


# --- parts of the patterns -----------------------------------------------------------------------

Parts = list[tuple[str, str]]


def _normalised(drafts: Drafts, node: DraftNode) -> list[tuple[str, str, Parts]]:
    """Return every (x, y, parts) for which the node is x / sqrt(y), with the formats of its parts:
    root and normed, sqrt and quotient, or sqrt, reciprocal and normed."""
    found: list[tuple[str, str, Parts]] = []
    last = ("normed", node.format)
    if node.op == "mul":
        for x, factor in (node.inputs, node.inputs[::-1]):
            inverse = drafts.nodes[factor]
            if inverse.op == "rsqrt":
                found.append((x, inverse.inputs[0], [("root", inverse.format), last]))
            elif inverse.op == "reciprocal":
                root = drafts.nodes[inverse.inputs[0]]
                parts = [("sqrt", root.format), ("reciprocal", inverse.format), last]
                found += [(x, root.inputs[0], parts)] if root.op == "sqrt" else []
    elif node.op == "quotient":
        root = drafts.nodes[node.inputs[1]]
        parts = [("sqrt", root.format), ("quotient", node.format)]
        found += [(node.inputs[0], root.inputs[0], parts)] if root.op == "sqrt" else []
    return found


def _root_mean_square(drafts: Drafts, x: str, spread: DraftNode) -> tuple[str, str, Parts] | None:
    """Return the normalised tensor where the spread is the mean square of x."""
    square = drafts.nodes[spread.inputs[0]] if spread.op == "mean" else None
    if square is None or square.op != "mul" or square.inputs != (x, x):
        return None
    parts = [("square", square.format), ("mean", spread.format)]
    centred = drafts.nodes[x]
    mean = _mean_of_centred(drafts, centred)
    if mean is None:
        return "rms_norm", x, parts
    last = [("square", square.format), ("mean2", spread.format)]
    return "layer_norm", mean.inputs[0], [
        ("mean", mean.format), ("centred", centred.format), *last
    ]  # fmt: skip


def _centred_spread(drafts: Drafts, x: str, spread: DraftNode) -> tuple[str, str, Parts] | None:
    """Return the normalised tensor where x is centred and the spread is its variance."""
    centred = drafts.nodes[x]
    mean = _mean_of_centred(drafts, centred)
    if mean is None or spread.op != "variance" or spread.inputs != mean.inputs:
        return None
    order = list(drafts.nodes)
    named = {"mean": mean, "centred": centred, "variance": spread}
    parts = sorted(named, key=lambda part: order.index(named[part].name))
    return "layer_norm", mean.inputs[0], [(part, named[part].format) for part in parts]


def _mean_of_centred(drafts: Drafts, node: DraftNode) -> DraftNode | None:
    """Return mean(x) where the node is x - mean(x)."""
    mean = drafts.nodes[node.inputs[1]] if node.op == "sub" else None
    found = mean is not None and mean.op == "mean" and mean.inputs == node.inputs[:1]
    return mean if found else None


def _times_constant(drafts: Drafts, name: str) -> list[tuple[str, str]]:
    node = drafts.nodes[name]
    if node.op != "mul":
        return []
    pairs = (node.inputs, node.inputs[::-1])
    return [(x, c) for x, c in pairs if _is_float(drafts.value(c)) and drafts.value(x) is None]


def _is_float(array: NDArray[Any] | None) -> bool:
    return array is not None and array.dtype == np.float32


def _is_half_turn(drafts: Drafts, name: str, x: str, half: int) -> bool:
    """Return whether the node is concat(-x[half:], x[:half]) along the last dimension."""
    node = drafts.nodes[name]
    last = len(node.shape) - 1
    if node.op != "concat" or node.attrs["dim"] != last or len(node.inputs) != 2:
        return False
    negative = drafts.nodes[node.inputs[0]]
    if negative.op != "neg" or node.shape[-1] != 2 * half:
        return False
    upper, lower = drafts.nodes[negative.inputs[0]], drafts.nodes[node.inputs[1]]
    whole = drafts.nodes[x].shape
    parts = ((upper, half, 2 * half), (lower, 0, half))
    return len(whole) == len(node.shape) and all(
        part.op == "view"
        and part.inputs == (x,)
        and dict(part.attrs) == View.sliced(whole, last, start, stop).attrs
        for part, start, stop in parts
    )


def _same(drafts: Drafts, x: str, node: DraftNode) -> bool:
    return drafts.nodes[x].shape == node.shape


# --- roles: which nodes belong to an attention that is written out -------------------------------
#
# They are found by data flow from each softmax. Nodes of a `scaled_dot_product_attention` call get
# their roles from that call.

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


def _keeps_all(node: DraftNode) -> bool:
    return node.op == "view" and "ranges" not in node.attrs


def _multiplies_values(user: DraftNode, probabilities: str) -> bool:
    return user.op == "matmul" and user.inputs[0] == probabilities != user.inputs[1]
