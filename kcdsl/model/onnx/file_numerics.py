"""The numerics that the quantisers of an ONNX file state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.model.numerics import Numerics, StaticQuantiser, Weights
from kcdsl.model.numerics.specification import linear_name
from kcdsl.source.files import excerpt

Section = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LinearQuantisation:
    """The quantisation of one linear, as the sections `activations` and `weights` of numerics;
    empty where nothing is quantised. `transposed`: its products read the weight as [out, in]."""

    activations: Section = field(default_factory=dict)
    weights: Section = field(default_factory=dict)
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class FileNumerics:
    """The numerics of the quantisers of a file: the quantisation of each linear, by its weight, and
    the quantisers of tensors. `compute` is the format of the program."""

    linears: Mapping[str, LinearQuantisation]
    compute: str
    quantisers: Mapping[str, StaticQuantiser] = field(default_factory=dict)

    @property
    def quantised(self) -> bool:
        """Return whether any linear or tensor is quantised."""
        linears = any(one != LinearQuantisation() for one in self.linears.values())
        return linears or bool(self.quantisers)

    def section(self) -> Section:
        """Return the numerics in the form of a contract.

        If all linears are quantised alike, except for static scales, this is the quantisation of
        the kernel; else each linear has an override.
        """
        found: Section = {"preset": "torch-eager", "compute": self.compute, "casts": "nearest"}
        if self.quantisers:
            found["quantisers"] = {
                name: {"scale": one.scale, "zero_point": one.zero_point}
                for name, one in self.quantisers.items()
            }
        if not self.linears:
            return found
        every = {linear_name(key): one for key, one in self.linears.items()}
        first = next(iter(every.values()))
        alike = all(
            one.weights == first.weights and _kind(one) == _kind(first) for one in every.values()
        )
        if not alike:
            parts = {
                name: {
                    **({"weights": one.weights} if one.weights else {}),
                    **({"activations": one.activations} if one.activations else {}),
                }
                for name, one in every.items()
            }
            return found | {"overrides": {name: part for name, part in parts.items() if part}}
        if first.weights:
            found["weights"] = first.weights
        if not first.activations:
            return found
        own = dict(first.activations)
        for name in ("input_scale", "input_zero_point"):
            given = {key: one.activations.get(name) for key, one in every.items()}
            if any(value != own.get(name) for value in given.values()):
                own[name] = given
        return found | {"activations": own}

    def refuse_other(self, numerics: Numerics) -> None:
        """Refuse (KC463) numerics of a kernel that differ from those of the file."""
        from kcdsl.model.presets import resolve

        claimed = dict(numerics.quantisers)
        for name in sorted({*claimed, *self.quantisers}):
            stated_one = self.quantisers.get(name)
            if claimed.get(name) != stated_one:
                what = "is not quantised"
                if stated_one is not None:
                    what = f"has scale {stated_one.scale} and zero point {stated_one.zero_point}"
                raise _other(name, f"the tensor {excerpt(name)} {what}")
        if not self.quantised:
            return
        for key, one in self.linears.items():
            stated = {"activations": one.activations} if one.activations else {}
            stated |= {"weights": one.weights} if one.weights else {}
            wanted = resolve({"preset": "torch-eager", "compute": self.compute, **stated})
            own = numerics.serving(key)
            if own.compute != self.compute:
                raise _other(key, f"it computes in {self.compute}, not in {own.compute}")
            mine, file = own.activations, wanted.activations
            same = (mine.format, mine.scale) == (file.format, file.scale)
            if file.static:
                same = same and mine.calibrated(key) == file.calibrated(key)
            else:
                same = same and mine == file
            if not same:
                what = file.format if file.quantised else "not quantised"
                raise _other(key, f"the input of {excerpt(linear_name(key))} is {what}")
            if own.weights != wanted.weights:
                raise _other(key, f"{excerpt(key)} is {wanted.weights.format}")

    def refuse_unserved(self, run: str, numerics: Numerics) -> None:
        """Refuse (KC463, KC465) numerics that differ from the file, which the adapter `run`
        executes unchanged; for a file without quantisers, numerics that quantise weights."""
        self.refuse_other(numerics)
        plain = all(w == Weights(self.compute) and not a.quantised for w, a in numerics.sections)
        if numerics.compute != self.compute or not (self.quantised or plain):
            raise refuse(
                codes.KERNEL_NUMERICS,
                f"{run} runs the file as it is, which stores and computes in {self.compute}",
                help=f"claim `compute: {self.compute}`, without formats of weights and activations",
            )


def _kind(one: LinearQuantisation) -> tuple[object, ...]:
    return one.activations.get("format"), one.activations.get("scale")


def _other(key: str, what: str) -> Refusal:
    return refuse(
        codes.NUMERICS,
        f"the numerics of the kernel are not those of the ONNX file, in which {what}",
        help="kcdsl init FILE.onnx writes the numerics that the file states",
    )
