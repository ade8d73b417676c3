"""The metric registry of a contract: built-in metrics and those that the user declares.

User metrics come from the modules in `metrics` of the configuration, which are read at every check,
and from installed packages (entry points of the group `kcdsl.metrics`), which are searched only for
a metric that is neither built in nor configured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Diagnostic, Refusal, Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.metrics import MetricDefinition, Registry
from kcdsl.source.config import Config, read_config
from kcdsl.source.files import read_source, shown

if TYPE_CHECKING:
    from kcdsl.metrics.declarations import Declared

GROUP = "kcdsl.metrics"
SIZE_LIMIT = 2**20
"""Largest Python file that is searched for declarations, in bytes."""


class Modules(NamedTuple):
    """The list `metrics` of a configuration, and its folder."""

    config: Config
    folder: Path

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names, each once."""
        return tuple(dict.fromkeys(self.config.metrics))

    @property
    def source(self) -> SourceFile | None:
        """Return the file with the list; None if it comes from the environment."""
        return self.config.origin("metrics").source

    def span(self, name: str) -> Span | None:
        """Return the place of a name in the configuration."""
        return self.config.place("metrics", self.config.metrics.index(name))


def read_registry(folder: Path | None, sink: Sink) -> Registry:
    """Return the metrics for contracts in `folder`; errors are in the sink.

    Without a folder there is no configuration. No user code is run.
    """
    modules = _configured(folder, sink) if folder is not None else None
    own: dict[str, Declared] = {}
    if modules is not None:
        for declared in _declared(modules, sink):
            _add(own, declared, sink)
    installed = cache(lambda: _installed(own, sink))
    return Registry({name: found.definition for name, found in own.items()}, installed)


def declarations(folder: Path | None, sink: Sink) -> Mapping[str, Declared]:
    """Return every metric that a user declares, with its place; installed packages included."""
    found: dict[str, Declared] = {}
    modules = _configured(folder, sink) if folder is not None else None
    if modules is not None:
        for declared in _declared(modules, sink):
            _add(found, declared, sink)
    for declared in _entry_points(sink):
        if declared.definition.name not in found:
            _add(found, declared, sink)
    return found


def configured_functions(folder: Path) -> Mapping[str, Path]:
    """Return the functions of metrics in the configuration file of a folder, each with the folder
    of that file; those of environment variables are excluded."""
    sink = Sink()
    modules = _configured(folder, sink)
    if modules is None or modules.config.origin("metrics").variable is not None:
        return {}
    found = (declared.definition.function for declared in _declared(modules, sink))
    return {function: modules.folder for function in found if function is not None}


def _add(found: dict[str, Declared], declared: Declared, sink: Sink) -> None:
    name = declared.definition.name
    other = found.get(name)
    if other is None:
        found[name] = declared
    elif other.definition.function != declared.definition.function:
        sink.add(
            Diagnostic(
                codes.METRIC_NAME_TAKEN,
                f"the metric `{name}` is declared by {declared.definition.function} and by "
                f"{other.definition.function}",
                declared.source,
                declared.span,
                help="give one of them another name",
            )
        )


# --- the configuration ---------------------------------------------------------------------------


def _configured(folder: Path, sink: Sink) -> Modules | None:
    config = read_config(folder, sink)
    return Modules(config, config.origin("metrics").folder) if config.metrics else None


def _declared(modules: Modules, sink: Sink) -> Iterator[Declared]:
    from kcdsl.check.expressions.names import is_reserved
    from kcdsl.metrics.declarations import read_declarations
    from kcdsl.source.modules import find_file, is_file_name, plain_name

    for name in modules.names:
        span = modules.span(name)
        if is_file_name(name) and Path(name).is_absolute():
            message = f"`{name}` is not relative, so contracts would differ from place to place"
            sink.add(
                Diagnostic(
                    codes.BAD_CONFIGURATION,
                    message,
                    modules.source,
                    span,
                    help="write the path from the folder of the configuration",
                )
            )
            continue
        path = find_file(name, modules.folder)
        if path is not None and is_file_name(name) and not _is_inside(path, modules.folder):
            message = f"`{name}` leads outside of the folder of its configuration"
            sink.add(
                Diagnostic(
                    codes.OUTSIDE_FOLDER,
                    message,
                    modules.source,
                    span,
                    help="move the file into the folder of the configuration, or name a module "
                    "of an installed package",
                )
            )
            continue
        source = None if path is None else _source(path, sink)
        if path is None:
            kind = "file" if is_file_name(name) else "module"
            sink.add(
                Diagnostic(
                    codes.METRIC_MODULE,
                    f"there is no Python {kind} `{name}`",
                    modules.source,
                    span,
                    help=f"it is looked for beside {modules.config.origin('metrics').where}"
                    + ("" if kind == "file" else " and among the installed modules"),
                )
            )
        if source is not None:
            yield from read_declarations(source, plain_name(name), sink, is_reserved)


def _is_inside(path: Path, folder: Path) -> bool:
    from kcdsl.model.files import Artefacts

    try:
        Artefacts.of(folder).admitted(path)
    except Refusal:
        return False
    return True


def _source(path: Path, sink: Sink) -> SourceFile | None:
    try:
        return read_source(shown(path), SIZE_LIMIT)
    except Refusal as refusal:
        _keep(refusal, sink)
        return None


def _keep(refusal: Refusal, sink: Sink) -> None:
    for diagnostic in refusal.diagnostics:
        sink.add(diagnostic)


# --- installed packages --------------------------------------------------------------------------


def _installed(own: Mapping[str, Declared], sink: Sink) -> Mapping[str, MetricDefinition]:
    """Return the metrics of installed packages that the configuration does not declare."""
    found: dict[str, Declared] = {}
    for declared in _entry_points(sink):
        if declared.definition.name not in own:
            _add(found, declared, sink)
        else:
            _add(dict(own), declared, sink)
    return {name: declared.definition for name, declared in found.items()}


def _entry_points(sink: Sink) -> Iterator[Declared]:
    import sys
    from importlib.metadata import entry_points

    points = sorted(entry_points(group=GROUP), key=lambda point: (point.value, point.name))
    if not points:
        return
    from kcdsl.check.expressions.names import is_reserved
    from kcdsl.metrics.declarations import read_declarations
    from kcdsl.source.modules import find_module

    for point in points:
        path = find_module(point.module, [entry for entry in sys.path if entry])
        if path is None:
            owner = f" of {point.dist.name}" if point.dist is not None else ""
            message = f"the entry point `{point.name}`{owner} names the module {point.module}"
            sink.add(
                Diagnostic(
                    codes.METRIC_MODULE,
                    f"{message}, which is not there",
                    help="install the distribution again, or remove it",
                )
            )
            continue
        source = _source(path, sink)
        if source is None:
            continue
        for declared in read_declarations(source, point.module, sink, is_reserved):
            function = declared.definition.function or ""
            if not point.attr or function == f"{point.module}:{point.attr}":
                yield declared
