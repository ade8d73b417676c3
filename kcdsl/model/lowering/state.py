"""The state that lowering and its handlers share: references, drafts, the current operation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kcdsl.model.lowering.drafts import Drafts, as_constant, unsupported
from kcdsl.model.lowering.evaluate import HALF, OWN, TYPES, stored_name, stored_type

MASKED = -1e30
"""A score at or below this is masked out: its softmax share is exactly zero."""

_INERT = frozenset({
    "memory_format", "non_blocking", "copy", "layout", "device", "pin_memory", "implicit",
    "cudnn_enable",
})  # fmt: skip
"""Arguments that change the device or the memory layout of a result, but not its numbers."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A value computed at run time: the name of its draft and its shape."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plain:
    """A tensor that depends neither on the input nor on a parameter, with its value per format."""

    values: Mapping[str, Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its shape."""
        return tuple(next(iter(self.values.values())).shape)

    @property
    def fixed(self) -> Tensor | None:
        """Return the tensor if it is the same in every format, its type included."""
        first, *others = self.values.values()
        same = all(v.dtype == first.dtype and torch.equal(v, first) for v in others)
        return first if same else None


@dataclass(frozen=True, slots=True)
class Varied:
    """An argument, such as a number, that differs from format to format."""

    values: Mapping[str, Any]


class Arguments(Mapping[str, Any]):
    """The arguments of a call by their names in its schema; records which were read."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values = values
        self._defaults = defaults
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        self._read.add(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def shown_by_the_result(self, *names: str) -> None:
        """Mark as read the arguments that shape and type of the result determine."""
        self._read.update(names)

    def inert(self, *names: str) -> None:
        """Mark as read the arguments that change no number of the result."""
        self._read.update(names)

    def unread(self) -> list[str]:
        """Return the unread arguments that are neither inert nor at their default."""
        return [
            name
            for name, value in self._values.items()
            if name not in self._read
            and name not in _INERT
            and not (name in self._defaults and _equal(value, self._defaults[name]))
        ]


def _equal(value: Any, default: Any) -> bool:
    plain = (bool, int, float, str, list, tuple, type(None), torch.dtype)
    return isinstance(value, plain) and type(value) is type(default) and value == default


class Lowering:
    """The state of one lowering: the drafts so far, and the current operation.

    `formats` are those in which the program was traced. `out_format` is the storage format of the
    current operation's result, as returned by `evaluate.stored_name`.
    """

    def __init__(self, formats: tuple[str, ...]) -> None:
        self.formats = formats
        self.drafts = Drafts(formats=formats)
        self.operator = ""
        self.origin = ""
        self.out_shape: tuple[int, ...] = ()
        self.out_format = OWN
        self._casts: dict[tuple[str, str], Ref] = {}

    @property
    def wide(self) -> str:
        """Return the format of intermediate results inside an operation."""
        wide = {f: torch.promote_types(TYPES[f], torch.float32) for f in self.formats}
        found = stored_name(wide)
        assert found is not None
        return found

    def emit(
        self,
        op: str,
        inputs: list[Any],
        shape: tuple[int, ...],
        /,
        *,
        stored: str | None = None,
        role: str = "",
        **attrs: Any,
    ) -> Ref:
        """Append a draft; plain inputs become constants. `stored` is its format, by default that
        of the current operation."""
        names = tuple(self.ref(i).name for i in inputs)
        format = self.out_format if stored is None else stored
        return Ref(self.drafts.add(op, names, shape, attrs, self.origin, format, role), shape)

    def ref(self, value: Any) -> Ref:
        """Return a value as a reference; a plain tensor becomes a constant."""
        match value:
            case Ref():
                return value
            case Plain():
                return self._constant(value)
            case _:
                raise self.unsupported("a number where a tensor is expected")

    def format_of(self, value: Ref) -> str:
        """Return the storage format of a value."""
        return self.drafts.nodes[value.name].format

    def same_in(self, format: str, value: Ref) -> list[Ref]:
        """Return a result and its predecessors through casts that are the identity in a format."""
        found = [value]
        node = self.drafts.nodes[value.name]
        while node.op == "cast":
            source = self.drafts.nodes[node.inputs[0]]
            if stored_type(node.format, format) != stored_type(source.format, format):
                break
            found.append(Ref(source.name, source.shape))
            node = source
        return found

    def cast(self, value: Ref, stored: str) -> Ref:
        """Return a cast of a value, shared by all readers; the value itself if it has the format.
        PyTorch rounds float64 to half precision by way of float32."""
        source = self.format_of(value)
        if source == stored:
            return value
        wide = source == "float64" or (source == OWN and "float64" in self.formats)
        half = stored in HALF or (stored == OWN and any(f in HALF for f in self.formats))
        if wide and half:
            both = source != OWN and stored == OWN and "float64" in self.formats
            if both:
                raise self.unsupported("a cast from float64 that float64 kernels do not round")
            value = self.cast(value, "float32")
        key = (value.name, stored)
        if key not in self._casts:
            self._casts[key] = self.emit("cast", [value], value.shape, stored=stored)
        return self._casts[key]

    def _constant(self, plain: Plain) -> Ref:
        """Return a plain tensor as a constant.

        A tensor that is equal in every format is stored exactly. One that is a rounding to the
        format is a constant of the kernel's own format, with a cast if it was widened since. Any
        other is refused, such as a table computed from rounded numbers.
        """
        fixed = plain.fixed
        if fixed is not None and not _by_format(plain, self.formats):
            stored = self._pinned(fixed)
            return self._add_constant(fixed.to(torch.float32) if stored == OWN else fixed, stored)
        source = plain.values["float32"]
        for name, value in plain.values.items():
            rounded = source.to(TYPES[name]).to(value.dtype)
            if not torch.equal(rounded, value):
                raise self.unsupported(
                    "a table whose values depend on the format that the module is converted to:"
                    " compute it before, and keep the result as a buffer, or from numbers alone"
                )
        stored = self._stored({name: v.dtype for name, v in plain.values.items()})
        return self.cast(self._add_constant(source, OWN), stored)

    def mask(self, keep: Tensor) -> Ref:
        """Return a bool tensor as a constant."""
        return self._add_constant(keep, OWN)

    def column(self, x: Ref) -> Ref:
        """Return a column of ones, one per row of x, as a constant of its format."""
        return self._add_constant(torch.ones(*x.shape[:-1], 1), self.format_of(x))

    def _pinned(self, value: Tensor) -> str:
        """Return the format of a constant that no conversion of the module changes."""
        if value.is_floating_point():
            return self._stored(dict.fromkeys(self.formats, value.dtype))
        for name in self.formats:
            if not torch.equal(value.to(TYPES[name]).to(torch.float64), value.to(torch.float64)):
                raise self.unsupported(f"integers that {name} does not hold")
        return OWN

    def _stored(self, types: Mapping[str, torch.dtype]) -> str:
        name = stored_name(types)
        if name is None:
            raise self.unsupported(f"a result of type {_types(types)}")
        return name

    def store(self, types: Mapping[str, torch.dtype]) -> None:
        """Set the storage format of the current operation's result, from its type in every
        format."""
        self.out_format = self._stored(types)

    def _add_constant(self, value: Tensor, stored: str) -> Ref:
        try:
            array = as_constant(value.detach().cpu())
        except ValueError as error:
            raise self.unsupported(str(error)) from None
        return Ref(self.drafts.constant(array, stored), array.shape)

    def unsupported(self, detail: str = "") -> Exception:
        """Build the refusal of the current operation."""
        return unsupported(self.origin, detail)

    def need(self, holds: bool, detail: str) -> None:
        """Refuse the current operation unless `holds`."""
        if not holds:
            raise self.unsupported(detail)

    def number(self, value: Any) -> float | None:
        """Return a number as a double; None for a tensor.

        A zero-dimensional tensor that conversions of the module do not change is a number, unless
        it decides the type of the result: kernels round it as they round a number.
        """
        match value:
            case bool():
                return None
            case int() | float():
                whole = isinstance(value, int) and float(value) != value
                self.need(not whole, f"the number {value}, which no double is")
                return float(value)
            case Varied():
                raise self.unsupported(
                    "a number that depends on the format that the module is converted to"
                )
            case Plain() if value.shape == () and (fixed := value.fixed) is not None:
                weak = not fixed.is_floating_point() or not _by_format(value, self.formats)
                if fixed.dtype == torch.bool or not weak or self._decides(fixed):
                    return None
                return float(fixed.item())
            case _:
                return None

    def _decides(self, value: Tensor) -> bool:
        pinned = value.is_floating_point() and self._pinned(value) == self.out_format
        return pinned and self.out_format != OWN


def _by_format(plain: Plain, formats: tuple[str, ...]) -> bool:
    """Return whether the type of a tensor is the module format in every export."""
    return all(plain.values[name].dtype == TYPES[name] for name in formats)


def _types(types: Mapping[str, torch.dtype]) -> str:
    names = {name: str(dtype).removeprefix("torch.") for name, dtype in types.items()}
    if len(set(names.values())) == 1:
        return next(iter(names.values()))
    return ", ".join(f"{dtype} in {name}" for name, dtype in names.items())


def plain_mask(value: Any) -> Tensor | None:
    """Return a plain bool tensor; None for anything else."""
    fixed = value.fixed if isinstance(value, Plain) else None
    return fixed if fixed is not None and fixed.dtype == torch.bool else None
