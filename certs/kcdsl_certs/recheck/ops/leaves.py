"""The block input, parameters, constants and embeddings in every domain (sections 2 and 7)."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.form import Form, Operand, Walk, known_form
from kcdsl_certs.recheck.affine.remainders import symbol
from kcdsl_certs.recheck.affine.result_rounding import Formed, round_result
from kcdsl_certs.recheck.affine.tape import Shared, TapeEntry
from kcdsl_certs.recheck.graphs.graph import Array, Node
from kcdsl_certs.recheck.interval import box, weight_ball
from kcdsl_certs.recheck.interval.box import Box, Floats, raised
from kcdsl_certs.recheck.interval.parameters import plain
from kcdsl_certs.recheck.interval.state import (
    DriftProblem,
    Mask,
    State,
    StoredMatrix,
    Value,
    reduce,
    stored,
    target,
)
from kcdsl_certs.recheck.interval.weight_ball import alike
from kcdsl_certs.recheck.linear_bounds.context import Added, Context, halves, nothing
from kcdsl_certs.recheck.numerics.formats import FLOAT32, FORMATS, nearest
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics
from kcdsl_certs.recheck.ops.operation import Operation
from kcdsl_certs.recheck.ops.views import add_versions


def known(t: Floats, i: Floats) -> State:
    """Return the state of numbers that are known exactly."""
    t_box, i_box = box.exact(t), box.exact(i)
    if np.array_equal(t, i):
        return State(t_box, i_box, box.exact(np.zeros(t.shape)))
    return State(t_box, i_box, box.sub(i_box, t_box))


def held(problem: DriftProblem, key: str, *, linear: bool) -> State:
    """Return a checkpoint tensor as both kernels store it, as a linear weight or plain.

    With a region around the weights the state encloses that of every θ' in it. Raises Rejected
    "parameter/…".
    """
    stored = problem.parameters
    if not problem.rho:
        get = stored.linear if linear else stored.plain
        return known(get(key, problem.train), get(key, problem.infer))
    kernels = problem.train, problem.infer
    if linear:
        kernels = problem.train.serving(key), problem.infer.serving(key)
    return State(*weight_ball.both(stored.singles(key), problem.rho, kernels, linear, key))


def rows(table: State, ids: NDArray[np.int64]) -> State:
    """Return rows of a table."""
    t, i, d = (part.map(lambda v: v[ids]) for part in (table.t, table.i, table.d))
    return State(t, i, d)


def source_interval(problem: DriftProblem, node: Node, inputs: list[Value]) -> State:
    """Return the block input: one float32 tensor for both kernels, stored where compute is coarse.

    Raises Rejected "graph/shape" or "rule/input".
    """
    node.attrs.exactly()
    if problem.centre is None or problem.radius is None or node.role:
        raise Rejected("rule/input", "a block input in a role, or of a block on token ids")
    centre = problem.centre
    if problem.rows is not None:
        centre = np.broadcast_to(centre, node.shape)  # the region has one row for all rows
    x = Box(box.add_down(centre, -problem.radius), box.add_up(centre, problem.radius))
    if x.shape != problem.block.input_shape:
        raise Rejected("graph/shape", "the region does not have the input's shape")
    if problem.drift is not None:
        return _apart(problem, x, problem.drift)
    (t, wrong_t), (i, wrong_i) = _taken(problem.train, x), _taken(problem.infer, x)
    if problem.errors is not None:
        problem.errors[node.name] = (wrong_t, wrong_i)
    return reduce(t, i, box.sub(wrong_i, wrong_t))


def _apart(problem: DriftProblem, x: Box, drift: Box) -> State:
    """Return an input that another block computed, enclosing every reading of it."""
    if drift.shape != x.shape or problem.rows is not None:
        raise Rejected("graph/shape", "the drift does not have the input's shape")
    return reduce(x, box.add(x, drift), drift, problem.entering)


def _taken(kernel: KernelNumerics, x: Box) -> tuple[Box, Box]:
    form = kernel.result("input", "")
    if form.precision >= FLOAT32.precision:
        return x, box.zeros(x.shape)
    return stored(kernel, form, x, np.zeros(x.shape), FLOAT32)


def parameter_value(problem: DriftProblem, node: Node, inputs: list[Value]) -> State | StoredMatrix:
    """Return a checkpoint tensor as either kernel stores it, or the magnitudes of a large matrix
    that only linears read, row by row."""
    key, parameters = node.attrs.text("key"), problem.parameters
    both = problem.train, problem.infer
    linear = node.name in problem.weights and not problem.rho
    parts = parameters.parts(key, *both) if linear else ()
    if not parts:
        return parameter_interval(problem, node, inputs)
    node.attrs.exactly("key", optional=("transposed",))
    value = drift = 0.0
    for rows in parts:
        t, i = parameters.rows(key, rows, *both)
        value = max(value, float(np.abs(t).max()))
        if i is not t:
            drift = max(drift, float(box.magnitude(box.sub(box.exact(i), box.exact(t))).max()))
    return StoredMatrix(parameters.shape(key), value, drift)


def parameter_interval(problem: DriftProblem, node: Node, inputs: list[Value]) -> State:
    """Return a checkpoint tensor as either kernel stores it.

    A tensor that is only read as a linear weight is stored as such, any other one as plain.
    """
    key = node.attrs.exactly("key", optional=("transposed",)).text("key")
    return held(problem, key, linear=node.name in problem.weights)


def constant_interval(problem: DriftProblem, node: Node, inputs: list[Value]) -> Value:
    """Return a constant: a mask, or a float32 table as either kernel stores it."""
    key = node.attrs.exactly("key").text("key")
    array = problem.block.constants.get(key)
    if array is None:
        raise Rejected("graph/field", f"there is no constant {key[:80]!r}")
    if array.dtype == "bool":
        return Mask(np.frombuffer(array.data, dtype=np.bool_).reshape(array.shape))
    if array.dtype != "float32":
        raise Rejected("graph/field", f"constant {key[:80]!r} is neither float32 nor bool")
    return table(array, key, node.format, problem.train, problem.infer)


def table(
    array: Array, key: str, pinned: str, train: KernelNumerics, infer: KernelNumerics
) -> State:
    """Return a float32 array as both kernels store it: as it is, if its format is pinned."""
    values = np.frombuffer(array.data, dtype="<f4").astype(np.float64).reshape(array.shape)
    if not np.isfinite(values).all():
        raise Rejected("parameter/not-finite", f"constant {key[:80]!r} holds NaN or infinity")
    if pinned:
        if not np.array_equal(nearest(values, FORMATS[pinned]), values):
            raise Rejected("graph/field", f"constant {key[:80]!r} is not one of {pinned}")
        return known(values, values)
    return known(
        plain(values, train.holding, key, train.cut_weights),
        plain(values, infer.holding, key, infer.cut_weights),
    )


def embedding_interval(problem: DriftProblem, node: Node, inputs: list[Value]) -> State:
    """Return rows of a table."""
    ids = np.array(node.attrs.exactly("ids").integers("ids", 0), dtype=np.int64)
    key = problem.keys.get(node.inputs[0])
    if key is None:
        raise Rejected("rule/weight", "the table of an embedding must be a parameter")
    if not ids.size or not len(problem.parameters.shape(key)) == 2:
        raise Rejected("graph/shape", "an embedding needs ids and a matrix")
    if int(ids.max()) >= problem.parameters.shape(key)[0]:
        raise Rejected("graph/field", "an id is beyond the table")
    return rows(held(problem, key, linear=False), ids)


def source_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return the block input, entry 0, stored where compute is coarser than float32."""
    node.attrs.exactly()
    centre, region = walk.problem.centre, walk.tape.region
    if centre is None or region is None or node.role:
        raise Rejected("rule/input", "a block input in a role, or of a block on token ids")
    if centre.shape != walk.problem.block.input_shape:
        raise Rejected("graph/shape", "the region does not have the input's shape")
    if walk.problem.drift is not None:
        add_versions(walk, node, walk.problem.entering[1 if walk.moved else 0])
        return _apart_affine(walk, centre, region, walk.problem.drift)
    form = target(walk.kernel, node)
    if form.precision >= FLOAT32.precision:
        return Form(centre, region, 0)
    formed = Formed(centre, region, ((0, lambda a: a),), np.zeros(centre.shape))
    return round_result(walk, node, formed, form, FLOAT32)


def _apart_affine(walk: Walk, centre: Floats, region: Floats, drift: Box) -> Form:
    """Return an input that another block stored: x, or x + e in the kernel that reads with drift.

    If only a box of e is known, its radius is an error of this entry. With ellipsoids e is an entry
    of its own, at which reverse passes may stop.
    """
    if drift.shape != centre.shape:
        raise Rejected("graph/shape", "the drift does not have the input's shape")
    if not walk.moved:
        return Form(centre, region, 0)
    middle, half = box.midpoint(drift)
    shifted = box.add(box.exact(centre), box.exact(middle))
    reference, slip = box.midpoint(shifted)
    radius = np.zeros(centre.shape)
    for more in (half, slip):
        radius = radius if more is None else radius + more
    radius = raised(radius)
    error_bound = raised(region + radius)
    if walk.problem.held is not None:
        apart = walk.tape.cut = symbol(walk, walk.problem.held, middle, radius, reference)
        place = walk.tape.add(TapeEntry(error_bound, ((0, lambda a: a), (apart, lambda a: a))))
        return Form(reference, error_bound, place)
    place = walk.tape.add(TapeEntry(error_bound, ((0, lambda a: a),), radius))
    return Form(reference, error_bound, place)


def leaf_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Operand:
    """Return a parameter, a constant or the rows of a table, as this kernel stores it."""
    rule = {
        "param": parameter_interval,
        "constant": constant_interval,
        "embedding": embedding_interval,
    }[node.op]
    value = rule(replace(walk.problem, rho=Fraction(0)), node, [])
    if isinstance(value, Mask):
        return value
    if not isinstance(value, State):
        raise Rejected("internal", "a leaf without a value")
    first = walk.kernel is walk.problem.train
    found = (value.t if first else value.i).lo
    if not walk.problem.rho or node.op == "constant":
        return known_form(found)
    wide = rule(walk.problem, node, [])
    if not isinstance(wide, State):
        raise Rejected("internal", "a leaf without a value")
    radius = around(found, wide.t if first else wide.i)
    shared = None
    if alike((walk.problem.train, walk.problem.infer), linear=False):
        shared = Shared(node.name, radius, np.zeros(radius.shape))
    return Form(found, radius, walk.tape.add(TapeEntry(radius, (), radius, shared=shared)))


def around(centre: Floats, wide: Box) -> Floats:
    """Return the largest distance of numbers in a box from `centre`."""
    far = np.maximum(box.add_up(wide.hi, -centre), box.add_up(centre, -wide.lo))
    return np.asarray(raised(np.maximum(far, 0.0)))


def source_bounds(context: Context, node: Node) -> None:
    """Write the block input: a box around the centre, whose drift is that of storing alone."""
    centre, radius = context.problem.centre, context.problem.radius
    if centre is None or radius is None:
        raise Rejected("rule/input", "a block on token ids has no block input")
    wide = np.ascontiguousarray(np.broadcast_to(radius, centre.shape))
    own = Added(np.zeros(centre.shape), wide)
    context.write(node, centre, lambda f: (), own, nothing(centre.shape))


def embedding_bounds(context: Context, node: Node) -> None:
    """Write the rows of a table, constants in either kernel."""
    state = context.state(node.name)
    if not (state.t.point and state.i.point):
        raise Rejected("rule/weight", "the table of an embedding must be known")
    middle, radius = halves(state.d)
    added = Added(middle, radius)
    context.write(node, state.t.lo, lambda f: (), nothing(state.shape), added)


OPERATIONS = {
    "input": Operation(0, 0, source_interval, source_affine, source_bounds, forms=False),
    "param": Operation(0, 0, parameter_value, leaf_affine, None, forms=False),
    "constant": Operation(0, 0, constant_interval, leaf_affine, None, forms=False),
    "embedding": Operation(1, 1, embedding_interval, leaf_affine, embedding_bounds, forms=False),
}
