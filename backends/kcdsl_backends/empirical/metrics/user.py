"""A user's own metrics: loading the functions that a contract names, and calling them.

The declaration is read from the text once more and must be the one that the program was compiled
with; only then is the module imported. What a function returns is used only if it has one finite
value in the declared range for each counted unit, and the same values when it is called again.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kcdsl.check.user_metrics import declarations
from kcdsl.declare import MARK
from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Refusal, Sink, refuse
from kcdsl.ir.kernels import LOGITS
from kcdsl.ir.terms import Program, UserMetric
from kcdsl.metrics import MEASURES, METRICS, MetricDefinition, registry_of, user_metric
from kcdsl.metrics.declarations import Declared
from kcdsl.model import own_code
from kcdsl.model.files import file_digest
from kcdsl.units import UNITS

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A metric of the user with the function that computes it and the digest of its file."""

    metric: UserMetric
    function: Callable[..., Any]
    parameters: tuple[str, ...]
    sha256: str


class UnusableFunction(ValueError):
    """A function gave no usable values for a request; the text says why."""


def measures_of(program: Program) -> Mapping[str, MetricDefinition]:
    """Return the definitions of all metrics that a program may name.

    With a server or a recorded kernel, metrics are measured at tokens that it draws, so every value
    varies from run to run; only the bytes of the cache do not, which follow from recorded lengths.
    Rollouts have metrics that a forward pass does not have.
    """
    own = registry_of(program).own
    recordings = [k.recording for k in (program.train, program.infer) if k.recording is not None]
    if any(recording.format == LOGITS for recording in recordings):
        return {**MEASURES, "noise_ratio": METRICS["noise_ratio"], **own}
    if not recordings and program.infer.service is None:
        return {**MEASURES, **own}
    found = {**METRICS, **own}
    return {name: replace(metric, noisy=name != "kv_memory") for name, metric in found.items()}


# --- loading -------------------------------------------------------------------------------------


def load_functions(program: Program, base: Path) -> tuple[UserFunction, ...]:
    """Import the functions of the user's metrics that a program names.

    `base` is the folder of the contract. Raises Refusal if a declaration is missing or differs from
    the compiled one, or if its module cannot be imported.
    """
    if not program.metrics:
        return ()
    sink = Sink()
    found = declarations(base, sink)
    if sink.has_errors:
        raise Refusal(tuple(sink))
    return tuple(_load(metric, found.get(metric.name), base) for metric in program.metrics)


def functions_record(functions: tuple[UserFunction, ...]) -> dict[str, Any]:
    """Return the names of the functions and the digests of their files, for reports."""
    if not functions:
        return {}
    return {
        "metrics": [
            {"name": f.metric.name, "function": f.metric.function, "sha256": f.sha256}
            for f in functions
        ]
    }


def _load(metric: UserMetric, declared: Declared | None, base: Path) -> UserFunction:
    if declared is None:
        raise refuse(
            codes.METRIC_FUNCTION,
            f"no module declares the metric `{metric.name}` ({metric.function}) any more",
            help="name its module in `metrics` of kcdsl.toml or pyproject.toml",
        )
    if user_metric(declared.definition) != metric:
        raise refuse(
            codes.METRIC_FUNCTION,
            f"the metric `{metric.name}` is declared otherwise than when the contract was compiled",
            help="compile the contract again",
            source=declared.source,
            span=declared.span,
        )
    module_name, _, name = metric.function.rpartition(":")
    path = Path(declared.source.name)
    own_code.record_imports(module_name, path, base)
    with own_code.importing(base):
        module = _import(metric, module_name, path, base)
    function = getattr(module, name, None)
    if not callable(function) or not hasattr(function, MARK):
        raise refuse(
            codes.METRIC_FUNCTION,
            f"{metric.function} is not the declared function once its module is imported",
            source=declared.source,
            span=declared.span,
            help="do not rebind the name of the function in its module, and leave "
            "`@kcdsl.metric` as its outermost decorator",
        )
    digest = sha256(declared.source.text.encode("utf-8")).hexdigest()
    if digest != (own_code.compiled_digest(path) or file_digest(path)):
        raise refuse(
            codes.CHANGED_MEANWHILE,
            f"{path} changed while the command ran",
            help="run it again: its results are for the files before the change",
        )
    parameters = tuple(signature(function).parameters)
    return UserFunction(metric, function, parameters, digest)


def _import(metric: UserMetric, name: str, path: Path, base: Path) -> ModuleType:
    """Import a module by its name, or a file by its path, and check that it is the file read."""
    try:
        if name.endswith(".py") or "/" in name:
            return _import_file(path)
        with _first_on_path(_root_of(name, path)):
            module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise refuse(
            codes.METRIC_FUNCTION,
            f"the module of the metric `{metric.name}` cannot be imported: "
            f"{type(error).__name__}: {error}",
            notes=(f"file: {path}",),
            help="import the file by itself with this Python to see where it fails, and "
            "install what it needs",
        ) from error
    imported = getattr(module, "__file__", None)
    if imported is None or Path(imported).resolve() != path.resolve():
        raise refuse(
            codes.METRIC_FUNCTION,
            f"importing {name} gives {imported}, and its metric was read from {path}",
            help="another module has the same name; rename one of them",
        )
    return module


def _import_file(path: Path) -> ModuleType:
    name = f"kcdsl_metrics_{sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _root_of(name: str, path: Path) -> Path:
    """Return the folder that holds the outermost package of a module."""
    root = path.parent
    for _ in range(name.count(".") + (path.name == "__init__.py")):
        root = root.parent
    return root


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(str(folder))


# --- calling -------------------------------------------------------------------------------------


def call(user: UserFunction, inputs: Mapping[str, Any], tokens: int) -> Array:
    """Return the values of a metric for one request of so many tokens, in base units.

    Shape [tokens] for a metric per token, [1] for one per request. Raises UnusableFunction if the
    function raises, if its values have another shape, are not finite or leave the declared range,
    or if a second call gives other values.
    """
    wanted = {name: inputs[name] for name in user.parameters}
    values = _values(user, wanted, tokens)
    again = _values(user, wanted, tokens)
    if values.tobytes() != again.tobytes():
        raise UnusableFunction("the function gives other values when it is called again")
    return values


def _values(user: UserFunction, inputs: Mapping[str, Any], tokens: int) -> Array:
    metric = user.metric
    try:
        with np.errstate(all="ignore"):
            returned = user.function(**inputs)
        values = np.array(returned)
    except (Exception, SystemExit) as error:
        raise UnusableFunction(f"the function raised {type(error).__name__}: {error}") from error
    if values.dtype.kind not in "biuf":
        raise UnusableFunction(f"the function returned {values.dtype}, not numbers")
    expected = [(tokens,)] if metric.counted == "token" else [(), (1,)]
    if values.shape not in expected:
        shape = "one value per token" if metric.counted == "token" else "one value per request"
        raise UnusableFunction(f"the function returned the shape {list(values.shape)}, not {shape}")
    values = values.astype(np.float64).reshape(-1)
    bad = int(np.count_nonzero(~np.isfinite(values)))
    if bad:
        raise UnusableFunction(f"{bad} of the {values.size} values of the function are not finite")
    scale = UNITS[metric.unit].factor
    for limit, beyond in ((metric.lower, np.less), (metric.upper, np.greater)):
        end = None if limit is None else float(limit / scale)
        outside = values[beyond(values, end)] if end is not None else values[:0]
        if outside.size:
            raise UnusableFunction(
                f"the function returned {float(outside[0])}, beyond the declared {end}"
            )
    return values * float(scale)
