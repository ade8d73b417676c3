"""Lower a block, exported in several formats, to drafts: one handler per aten operation.

A value is a `Ref` (it depends on the block input or on parameters), or it is plain, that is known
in every format. An operation on plain values is executed, in each format separately.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from kcdsl.diagnostics import codes, refuse
from kcdsl.model.lowering.drafts import Drafts
from kcdsl.model.lowering.evaluate import TYPES
from kcdsl.model.lowering.handlers import HANDLERS
from kcdsl.model.lowering.state import Arguments, Lowering, Plain, Ref, Varied

_DETERMINISTIC = {"train": (False,), "training": (False,), "p": (0.0,), "dropout_p": (0.0,)}
"""Arguments, with the values for which an operation draws no random numbers."""
_UNSET = ("empty", "new_empty", "resize")
"""Prefixes of the names of operations whose results are uninitialised memory."""

Values = dict[fx.Node, Any]


@dataclass(frozen=True, slots=True)
class Traced:
    """A block that was converted to one format and exported.

    `tensors` holds every parameter and buffer by its name in the exported module, `keys` the
    checkpoint key of every parameter by the identity of its tensor, `transposed` the keys of those
    that the checkpoint stores transposed.
    """

    format: str
    program: ExportedProgram
    tensors: Mapping[str, Tensor]
    keys: Mapping[int, str]
    transposed: frozenset[str] = frozenset()


def lower(traced: Sequence[Traced], ids: Tensor | None) -> Drafts:
    """Lower a block with one input, exported in several formats, float32 among them.

    A format may occur twice, to refuse exports that differ from run to run. Where the input is
    token ids, `ids` holds them and they are plain values.
    """
    work = _BlockLowering(Lowering(tuple(dict.fromkeys(t.format for t in traced))), traced, ids)
    for nodes in work.steps():
        match nodes[0].op:
            case "call_function":
                work.call(nodes)
            case "output":
                work.output(nodes)
            case _:
                work.attribute(nodes)
    return work.state.drafts


class _BlockLowering:
    """The state of lowering a block: for every export, the value of every node so far."""

    def __init__(self, state: Lowering, traced: Sequence[Traced], ids: Tensor | None) -> None:
        self.state = state
        self.traced = traced
        self.values: list[Values] = [{} for _ in traced]
        self._leaves: dict[str, Ref] = {}
        for trace, own in zip(traced, self.values, strict=True):
            self._inputs(trace, own, ids)

    def steps(self) -> list[tuple[fx.Node, ...]]:
        """Return the steps, each with the node of every export. Refuse exports that differ."""
        every = [[n for n in t.program.graph.nodes if n.op != "placeholder"] for t in self.traced]
        for other, trace in zip(every, self.traced, strict=True):
            done = [[(n.op, str(n.target)) for n in nodes] for nodes in (every[0], other)]
            if done[0] != done[1]:
                raise refuse(
                    codes.EXPORT_FAILED,
                    f"the block is another program in {trace.format}, or each time that it is run",
                    help="let it do the same in every format, and change no tensor in place",
                )
        return list(zip(*every, strict=True))

    def attribute(self, nodes: Sequence[fx.Node]) -> None:
        """Look up an attribute of the exported program, such as a nested program."""
        modules = [trace.program.graph_module for trace in self.traced]
        names = [str(node.target) for node in nodes]
        found = [operator.attrgetter(n)(m) for n, m in zip(names, modules, strict=True)]
        self._keep(nodes, found)

    def output(self, nodes: Sequence[fx.Node]) -> None:
        """Record the output of the block."""
        self.state.origin = "the block"
        found = self._merged([args[0] for args, _ in self._arguments(nodes)])
        alone = isinstance(found, list) and len(found) == 1 and isinstance(found[0], Ref)
        self.state.need(alone, "it must return one tensor that depends on its input")
        self.state.drafts.output = found[0].name

    def call(self, nodes: Sequence[fx.Node]) -> None:
        """Run an operation on plain values; lower any other operation."""
        state, target = self.state, nodes[0].target
        calls = self._arguments(nodes)
        if target is operator.getitem:
            self._keep(nodes, [args[0][args[1]] for args, _ in calls])
            return
        schema: Any = getattr(target, "_schema", None)
        name = str(schema.name if schema else target)
        state.operator = name.removeprefix("aten::")
        state.origin = f"{name} in {_module_path(nodes[0])}"
        bound = [_bind(schema, *call) for call in calls] if schema else []
        _refuse_random(state, target, bound)
        if not any(_has_reference(call) for call in calls):
            with torch.no_grad():
                self._keep(nodes, [_run(target, *call) for call in calls])
            return
        if state.operator == "_assert_tensor_metadata":
            return
        handler = HANDLERS.get(state.operator)
        if handler is None or schema is None:
            raise state.unsupported()
        self._result(nodes)
        merged = {name: self._merged([b[name] for b in bound]) for name in bound[0]}
        defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        arguments = Arguments(merged, defaults)
        found = handler(state, arguments)
        unread = arguments.unread()
        state.need(not unread, ", ".join(f"with {n}={merged[n]!r}" for n in unread))
        self._keep(nodes, [found] * len(nodes))

    def _inputs(self, trace: Traced, own: Values, ids: Tensor | None) -> None:
        nodes = {n.name: n for n in trace.program.graph.nodes if n.op == "placeholder"}
        for spec in trace.program.graph_signature.input_specs:
            node = nodes[spec.arg.name]
            if spec.kind is InputKind.USER_INPUT:
                own[node] = ids if ids is not None else self._leaf("", node.meta["val"])
                continue
            target = spec.target or ""
            tensor = trace.tensors.get(target)
            if tensor is None:
                tensor = trace.program.constants[target]
            if not isinstance(tensor, Tensor):
                raise refuse(
                    codes.OPERATION_UNSUPPORTED,
                    f"the block reads {target!r}, a {type(tensor).__name__}, which is no tensor",
                    help="compute what depends on it before, and keep the result as a buffer",
                )
            key = trace.keys.get(id(tensor))
            if key is not None:
                if tensor.dtype != TYPES[trace.format]:
                    raise refuse(
                        codes.OPERATION_UNSUPPORTED,
                        f"the parameter {target!r} stays {tensor.dtype} in a module that is"
                        f" converted to {trace.format}",
                        help="let the conversion of the module convert every parameter",
                    )
                own[node] = self._leaf(key, tensor)
            elif spec.kind is InputKind.PARAMETER:
                raise refuse(
                    codes.OPERATION_UNSUPPORTED,
                    f"the block reads the parameter {target!r}, which the model does not own",
                    help="let blocks() return parts of the module that share its parameters",
                )
            else:
                own[node] = tensor.detach()

    def _leaf(self, key: str, tensor: Tensor) -> Ref:
        """Return the node of a parameter, or of the input if there is no key; create it if
        needed."""
        if key not in self._leaves:
            shape, drafts = tuple(tensor.shape), self.state.drafts
            turned = key in self.traced[0].transposed
            name = drafts.param(key, shape, turned) if key else drafts.add("input", (), shape)
            self._leaves[key] = Ref(name, shape)
        return self._leaves[key]

    def _arguments(self, nodes: Sequence[fx.Node]) -> list[tuple[Any, Any]]:
        return [
            (fx.map_arg(n.args, own.__getitem__), fx.map_arg(n.kwargs, own.__getitem__))
            for n, own in zip(nodes, self.values, strict=True)
        ]

    def _keep(self, nodes: Sequence[fx.Node], found: Sequence[Any]) -> None:
        for node, own, value in zip(nodes, self.values, found, strict=True):
            own[node] = value

    def _result(self, nodes: Sequence[fx.Node]) -> None:
        """Set the shape and the storage format of the current operation's result."""
        metas = [n.meta.get("val") for n in nodes]
        metas = [m[0] if isinstance(m, list | tuple) and m else m for m in metas]
        tensors = [m for m in metas if isinstance(m, Tensor)]
        self.state.need(len(tensors) == len(nodes), "its result is no tensor")
        self.state.out_shape = tuple(int(n) for n in tensors[0].shape)
        pairs = zip(self.traced, tensors, strict=True)
        self.state.store({trace.format: tensor.dtype for trace, tensor in pairs})

    def _merged(self, found: Sequence[Any]) -> Any:
        """Return one value from the values of all exports."""
        first = found[0]
        if isinstance(first, list | tuple):
            lengths = {len(v) if isinstance(v, list | tuple) else -1 for v in found}
            self.state.need(len(lengths) == 1, "with other arguments from format to format")
            return [self._merged(place) for place in zip(*found, strict=True)]
        if isinstance(first, Tensor):
            return Plain(self._by_format(found, _same_tensor))
        if isinstance(first, Ref):
            return self._common(found)
        values = self._by_format(found, _same_value)
        return first if all(_same_value(first, v) for v in found) else Varied(values)

    def _common(self, found: Sequence[Any]) -> Ref:
        """Return the result that every export reads.

        A cast is the identity in some formats; exports in such a format may name its operand or its
        result.
        """
        state = self.state
        state.need(all(isinstance(v, Ref) for v in found), "it reads something else each time")
        known = [
            state.same_in(trace.format, ref) for trace, ref in zip(self.traced, found, strict=True)
        ]
        shared = [ref for ref in known[0] if all(ref in others for others in known)]
        state.need(bool(shared), "it reads something else each time")
        return shared[0]

    def _by_format(self, found: Sequence[Any], same: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for trace, value in zip(self.traced, found, strict=True):
            again = values.setdefault(trace.format, value)
            self.state.need(
                type(value) is type(found[0]) and same(again, value),
                "a value that is another one each time that the block is run",
            )
        return values


def _run(target: Any, args: Any, kwargs: Any) -> Any:
    return target(*args, **kwargs)


def _same_tensor(one: Tensor, two: Tensor) -> bool:
    alike = one.dtype == two.dtype and one.shape == two.shape
    return alike and torch.equal(torch.nan_to_num(one), torch.nan_to_num(two))


def _same_value(one: Any, two: Any) -> bool:
    both_nan = isinstance(one, float) and one != one and two != two
    return type(one) is type(two) and bool(one == two or both_nan)


def _refuse_random(state: Lowering, target: Any, bound: Sequence[Mapping[str, Any]]) -> None:
    """Refuse an operation whose result is random or uninitialised memory."""
    state.need(not state.operator.startswith(_UNSET), "a result that is never set")
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return
    for arguments in bound:
        fixed = (arguments[n] in values for n, values in _DETERMINISTIC.items() if n in arguments)
        state.need(any(fixed), "a random result")


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


def _bind(schema: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by their names in the schema, defaults filled in."""
    bound: dict[str, Any] = {}
    for i, parameter in enumerate(schema.arguments):
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
