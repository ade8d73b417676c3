"""From an exported program to drafts: one handler per aten operation, constants folded on the way.

A value is a `Ref` (it depends on the block input or on parameters) or a plain tensor or number
(it does not). An operation on plain values is simply executed.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from kcdsl.diagnostics import codes, refuse
from kcdsl.model.drafts import Drafts
from kcdsl.model.handlers import HANDLERS
from kcdsl.model.lowering_state import Lowering, Ref


def lower(
    program: ExportedProgram,
    keys: Mapping[int, str],
    ids: Tensor | None,
    targets: Mapping[str, Any],
) -> Drafts:
    """Lower an exported program with one input.

    `keys` gives the checkpoint key of every parameter by the identity of its tensor, `targets` the
    tensor of every parameter and buffer by its name in the exported module. Where the input is
    token ids, `ids` holds them and they count as plain values.
    """
    state = Lowering()
    values = _inputs(state, program, keys, ids, targets)
    for node in program.graph.nodes:
        if node.op == "call_function":
            values[node] = _call(state, node, values)
        elif node.op == "output":
            outputs = node.args[0]
            result = values[outputs[0]] if len(outputs) == 1 else None
            state.origin = "the block"
            state.need(
                isinstance(result, Ref), "it must return one tensor that depends on its input"
            )
            assert isinstance(result, Ref)
            state.drafts.output = result.name
    return state.drafts


def _inputs(
    state: Lowering,
    program: ExportedProgram,
    keys: Mapping[int, str],
    ids: Tensor | None,
    targets: Mapping[str, Any],
) -> dict[fx.Node, Any]:
    values: dict[fx.Node, Any] = {}
    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            if ids is not None:
                values[node] = ids
            else:
                shape = tuple(node.meta["val"].shape)
                values[node] = Ref(state.drafts.add("input", (), shape), shape)
            continue
        target = spec.target or ""
        tensor = targets[target] if target in targets else program.constants[target]
        key = keys.get(id(tensor))
        if key is not None:
            shape = tuple(tensor.shape)
            values[node] = Ref(state.drafts.param(key, shape), shape)
        elif spec.kind is InputKind.PARAMETER:
            raise refuse(
                codes.OPERATION_UNSUPPORTED,
                f"the block reads the parameter {target!r}, which the model does not own",
                help="let blocks() return parts of the module that share its parameters",
            )
        else:
            values[node] = tensor.detach()
    return values


def _call(
    state: Lowering,
    node: fx.Node,
    values: Mapping[fx.Node, Any],
) -> Any:
    args: Any = fx.map_arg(node.args, lambda n: values[n])
    kwargs: Any = fx.map_arg(node.kwargs, lambda n: values[n])
    if node.target is operator.getitem:
        return args[0][args[1]]
    target: Any = node.target
    if not _has_reference((args, kwargs)):
        with torch.no_grad():
            return target(*args, **kwargs)
    name = str((getattr(target, "_schema", None) and target._schema.name) or target)
    state.operator = name.removeprefix("aten::")
    state.origin = f"{name} in {_module_path(node)}"
    if name in ("aten::_assert_tensor_metadata",):
        return None
    handler = HANDLERS.get(state.operator)
    if handler is None:
        raise state.unsupported()
    value = node.meta.get("val")
    state.out_shape = tuple(int(n) for n in value.shape) if isinstance(value, Tensor) else ()
    return handler(state, _bind(target, args, kwargs))


def _has_reference(value: Any) -> bool:
    match value:
        case Ref():
            return True
        case tuple() | list():
            return any(_has_reference(v) for v in value)
        case dict():
            return any(_has_reference(v) for v in value.values())
        case _:
            return False


def _bind(target: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by their names in the schema, defaults filled in."""
    bound: dict[str, Any] = {}
    for i, parameter in enumerate(target._schema.arguments):
        if i < len(args):
            bound[parameter.name] = args[i]
        elif parameter.name in kwargs:
            bound[parameter.name] = kwargs[parameter.name]
        else:
            bound[parameter.name] = parameter.default_value
    return bound


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path, kind = list(stack.values())[-1] if stack else ("", "")
    kind = kind if isinstance(kind, str) else kind.__name__
    where = f"{path or 'the block itself'} ({kind.rsplit('.', 1)[-1]})"
    return where if stack else "the block itself"
