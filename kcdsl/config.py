"""The configuration: what `kcdsl.toml`, `pyproject.toml` and the environment say.

The nearest folder counts that has a `kcdsl.toml` or a `pyproject.toml` with `[tool.kcdsl]`, upwards
from where a command or a contract stands; `kcdsl.toml` wins in the same folder. A variable of the
environment counts more than the file, and an option of the command line more than both.

The user's own file (`user_file`) counts less than all of them. Only it and the environment can give
the options that a folder must not decide for itself, such as that its code may run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

from kcdsl.diagnostics.codes import BAD_CONFIGURATION, RETIRED, all_codes
from kcdsl.diagnostics.model import Diagnostic, Refusal, Severity, Sink
from kcdsl.diagnostics.render import FORMATS
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.source.files import read_source, user_place

FILES = (("kcdsl.toml", ()), ("pyproject.toml", ("tool", "kcdsl")))
"""The files of a folder, in the order of their weight, with the path to our section."""
COLOURS = ("auto", "always", "never")
SEVERITIES = tuple(severity.value for severity in Severity)
CODES_HELP = "such as KC208 or KC5; `kcdsl explain` lists the codes"
_CODES = re.compile("KC[0-9]{0,3}")
_OF_POLICIES = frozenset({"trusted-keys", "threshold", "max-validity"})


class Kind(Enum):
    """What an option holds, in words."""

    TEXT = "a text"
    TRUTH = "true or false"
    TEXTS = "a list of texts"
    CODES = "a list of codes, or of their beginnings"


@dataclass(frozen=True, slots=True)
class Option:
    """An option of the configuration. `allowed` lists its words, where only some are allowed; a
    word of `format` may go on with `=FILE`. One that is `personal` is not taken from the file of a
    folder."""

    name: str
    kind: Kind
    default: Any
    help: str
    allowed: tuple[str, ...] = ()
    personal: bool = False

    @property
    def field(self) -> str:
        """Return the name of its field in `Config`."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """Return its variable of the environment."""
        return f"KCDSL_{self.field.upper()}"


OPTIONS = (
    Option("allow-folders", Kind.TEXTS, (), "folders whose files contracts may name as well"),
    Option("color", Kind.TEXT, "auto", "when output is coloured", COLOURS),
    Option("contract", Kind.TEXT, None, "the contract of commands that are given none"),
    Option("docs-url", Kind.TEXT, None, "where the pages of codes are published: URL/KC203.md"),
    Option("exclude", Kind.TEXTS, (), "files that are left out of the folders given"),
    Option("fail-on", Kind.TEXT, "error", "least severity that fails `kcdsl lint`", SEVERITIES),
    Option("format", Kind.TEXTS, (), "how `kcdsl lint` writes, as its --format", FORMATS),
    Option("ignore", Kind.CODES, (), "codes whose warnings and notes are not shown"),
    Option("metrics", Kind.TEXTS, (), "modules and files that declare metrics"),
    Option("refuse-suppressions", Kind.TRUTH, False, "refuse contracts with accepted findings"),
    Option("select", Kind.CODES, (), "the only codes whose warnings and notes are shown"),
    Option(
        "trusted-folders",
        Kind.TEXTS,
        (),
        "folders whose contracts may run code of their own",
        personal=True,
    ),
)
"""Every option, by name; `_` in a name counts as `-`."""


def user_folder(environment: Mapping[str, str] | None = None) -> Path | None:
    """Return the folder of the user's own configuration; None where there is no home."""
    variables = os.environ if environment is None else environment
    folder = user_place("XDG_CONFIG_HOME", ".config", environment=variables)
    return None if folder is None else folder / "kcdsl"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from: a variable, a key of a file, or neither, the default.

    `folder` is what relative paths in the value are relative to.
    """

    folder: Path
    variable: str | None = None
    source: SourceFile | None = None
    key: tuple[str, ...] = ()

    @property
    def span(self) -> Span | None:
        """Return the place of the key in the file."""
        return None if self.source is None else _key_span(self.source, self.key)

    @property
    def where(self) -> str:
        """Return the name of the file or of the variable; "default" where there is neither."""
        return self.variable or (self.source.name if self.source is not None else "default")

    def __str__(self) -> str:
        if self.variable is not None:
            return self.variable
        if self.source is None or self.span is None:
            return "default"
        return f"{self.source.name}:{self.source.position(self.span.start).line}"


@dataclass(frozen=True, slots=True)
class Config:
    """The values of all options; `origins` has those that were given, by the name of the option.

    `file` is the configuration file of the folder, `own` that of the user; None where there is
    none.
    """

    allow_folders: tuple[str, ...] = ()
    color: str = "auto"
    contract: str | None = None
    docs_url: str | None = None
    exclude: tuple[str, ...] = ()
    fail_on: str = "error"
    format: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    refuse_suppressions: bool = False
    select: tuple[str, ...] = ()
    trusted_folders: tuple[str, ...] = ()
    file: SourceFile | None = None
    own: SourceFile | None = None
    origins: Mapping[str, Origin] = field(default_factory=dict)

    def origin(self, name: str) -> Origin:
        """Return where the value of an option came from."""
        return self.origins.get(name, Origin(Path()))

    def place(self, name: str, *path: int) -> Span | None:
        """Return where a value, or an item of a list, is written in the file; None where no place
        can be told."""
        origin, value = self.origin(name), getattr(self, name.replace("-", "_"))
        if origin.source is None:
            return None
        for index in path:
            value = value[index]
        if isinstance(value, str):
            from kcdsl.source.toml import text_span

            found = text_span(origin.source.text, (*origin.key, *path), value)
            if found is not None or not path:
                return found or origin.span
            # A single format may be written without a list.
            found = text_span(origin.source.text, origin.key, value)
            if found is not None:
                return found
        return origin.span


def load_config(start: Path, environment: Mapping[str, str] | None = None) -> Config:
    """Return the configuration of a folder; raises Refusal where it is not usable."""
    sink = Sink()
    config = read_config(start, sink, environment)
    if sink.has_errors:
        raise Refusal(tuple(sink))
    return config


def read_config(start: Path, sink: Sink, environment: Mapping[str, str] | None = None) -> Config:
    """Return the configuration of a folder; what cannot be used is reported and left out."""
    variables = os.environ if environment is None else environment
    mine = user_file(variables)
    own = None if mine is None or not mine.is_file() else _read(mine, (), sink)
    file = _nearest(start, sink, mine)
    config = Config(file=file[0] if file else None, own=own[0] if own else None)
    if own is not None and mine is not None:
        config = _with_file(config, own[0], mine.parent, own[1], sink)
    if file is not None:
        config = _with_file(config, *file, sink)
    for option in OPTIONS:
        text = variables.get(option.variable)
        if text is not None:
            config = _from_environment(config, option, text, sink)
    return config


def allowed_folders(start: Path, environment: Mapping[str, str] | None = None) -> tuple[Path, ...]:
    """Return the folders whose files the contracts of a folder may name beside those below it.

    The variable of `allow-folders` and the user's own file may name any. The files of this folder
    and of those above it speak of folders below their own alone, so that a contract brings no
    permission that its folder does not have.
    """
    variables = os.environ if environment is None else environment
    option = next(o for o in OPTIONS if o.name == "allow-folders")
    named = [part.strip() for part in variables.get(option.variable, "").split(",")]
    mine, here = user_file(variables), start.resolve()
    if mine is not None and mine.is_file():
        named += _own_entries(option, mine, (), own=True)
    found = [Path(name).expanduser().resolve() for name in named if name]
    for folder in (here, *here.parents):
        for name, section in FILES:
            if (folder / name).is_file() and folder / name != mine:
                found += [
                    (folder / entry).resolve()
                    for entry in _own_entries(option, folder / name, section, own=False)
                ]
    return tuple(found)


def _own_entries(
    option: Option, file: Path, section: tuple[str, ...], *, own: bool
) -> tuple[str, ...]:
    """Return the entries of an option that holds texts in one file; none where it is in error."""
    sink = Sink()
    read = _read(file, section, sink)
    if read is None:
        return ()
    config = Config(own=read[0] if own else None)
    for key, value in read[1].items():
        if key.replace("_", "-") == option.name:
            config = _take(config, key, value, read[0], file.parent, sink)
    found: tuple[str, ...] = getattr(config, option.field)
    return found


# --- the files -----------------------------------------------------------------------------------


def user_file(environment: Mapping[str, str] | None = None) -> Path | None:
    """Return where the user's own configuration is; None where there is no home."""
    folder = user_folder(environment)
    return None if folder is None else (folder / "kcdsl.toml").resolve()


_SIZE_LIMIT = 2**18
"""Largest configuration in bytes."""
_ENTRIES = 100
"""The most entries of a configuration that are looked at one by one."""
_DOTS = 200
"""The most points that a line of a configuration has."""


def _nearest(
    start: Path, sink: Sink, mine: Path | None
) -> tuple[SourceFile, Path, Mapping[str, Any]] | None:
    """Return the nearest file that has our section, its folder, and the section; not `mine`."""
    here = start.resolve()
    for folder in (here, *here.parents):
        for name, section in FILES:
            if (folder / name).is_file() and folder / name != mine:
                found = _read(folder / name, section, sink)
                if found is not None:
                    return found[0], folder, found[1]
    return None


@lru_cache(maxsize=4)
def _tables(text: str) -> Mapping[str, Any]:
    """Return the tables of a TOML text, which a language server asks for at every edit."""
    import tomllib

    return tomllib.loads(text)


def _read(
    file: Path, section: tuple[str, ...], sink: Sink
) -> tuple[SourceFile, Mapping[str, Any]] | None:
    """Return the section of a file; None where it has none, or none that can be read."""
    try:
        source = read_source(shown(file), _SIZE_LIMIT)
    except Refusal as refusal:
        for diagnostic in refusal.diagnostics:
            sink.add(diagnostic)
        return None
    if section and section[-1] not in source.text:
        return None
    import tomllib

    try:
        if any(line.count(".") > _DOTS for line in source.text.split("\n")):
            raise RecursionError  # reading such a key takes the square of its length
        table: Any = _tables(source.text)
    except RecursionError:
        message = f"{source.name} nests too deeply"
        sink.add(Diagnostic(BAD_CONFIGURATION, message, source, Span(0, 0)))
        return source, {}
    except tomllib.TOMLDecodeError as error:
        from kcdsl.source.toml import error_span

        problem = str(error).partition(" (at ")[0]
        message = f"{source.name} is not valid TOML: {problem}"
        sink.add(Diagnostic(BAD_CONFIGURATION, message, source, error_span(source, error)))
        return source, {}
    except ValueError as error:  # a number of too many digits
        message = f"{source.name} cannot be read: {error}"
        sink.add(Diagnostic(BAD_CONFIGURATION, message, source, Span(0, 0)))
        return source, {}
    for number, key in enumerate(section):
        table = table.get(key)
        if table is None:
            return None
        if not isinstance(table, dict):
            span = _key_span(source, section[: number + 1])
            message = f"`{'.'.join(section[: number + 1])}` is not a table"
            sink.add(Diagnostic(BAD_CONFIGURATION, message, source, span))
            return source, {}
    return source, table


def shown(path: Path) -> Path:
    """Return a path as a person would name it: from the current folder, where it is below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _section(source: SourceFile) -> tuple[str, ...]:
    return dict(FILES)[Path(source.name).name]


def _key_span(source: SourceFile, path: tuple[str, ...]) -> Span:
    from kcdsl.source.toml import key_span

    return key_span(source.text, path) or Span(0, 0)


def _with_file(
    config: Config, source: SourceFile, folder: Path, table: Mapping[str, Any], sink: Sink
) -> Config:
    """Return the configuration with a file; what a file before it gave is replaced."""
    before = config.origins
    config = replace(config, origins={})
    if len(table) > _ENTRIES:
        message = f"{source.name} has {len(table)} options, and there are {len(OPTIONS)}"
        sink.add(Diagnostic(BAD_CONFIGURATION, message, source, Span(0, 0)))
        return replace(config, origins=before)
    for key, value in table.items():
        config = _take(config, key, value, source, folder, sink)
    return replace(config, origins={**before, **config.origins})


def _take(
    config: Config, key: str, value: Any, source: SourceFile, folder: Path, sink: Sink
) -> Config:
    """Return the configuration with one entry of a file, or report why it cannot be used."""
    origin = Origin(folder, source=source, key=(*_section(source), key))
    option = next((o for o in OPTIONS if o.name == key.replace("_", "-")), None)
    if option is None:
        sink.add(_unknown(key, origin))
        return config
    if option.personal and source is not config.own:
        message = f"`{option.name}` is yours to say, not the folder's"
        mine = user_file()
        help = f"write it in {mine}" if mine is not None else f"set {option.variable}"
        sink.add(Diagnostic(BAD_CONFIGURATION, message, source, origin.span, help=help))
        return config
    if option.name in config.origins:
        message, help = f"`{option.name}` is written twice, with `-` and with `_`", "remove one"
        sink.add(Diagnostic(BAD_CONFIGURATION, message, source, origin.span, help=help))
        return config
    given = (value,) if option.name == "format" and isinstance(value, str) else _frozen(value)
    if not _fits(option, given):
        example = _example(option)
        message = f"`{key}` takes {option.kind.value}"
        sink.add(Diagnostic(BAD_CONFIGURATION, message, source, origin.span, help=example))
        return config
    changed = _with(config, option, given, origin)
    wrong = [(path, word) for path, word in _words(option, given) if not _allowed(option, word)]
    for path, word in wrong:
        place = changed.place(option.name, *path)
        message, help = f"`{option.name}` cannot be `{word}`", _help(option, word)
        sink.add(Diagnostic(BAD_CONFIGURATION, message, source, place, help=help))
    if wrong:
        return config
    if option.name == "allow-folders" and source is not config.own:
        for index, entry in enumerate(given):
            if not (folder / entry).resolve().is_relative_to(folder.resolve()):
                message = f"`{entry}` is no folder below that of {Path(source.name).name}"
                help = f"{option.variable}=FOLDER,… allows folders elsewhere"
                place = changed.place(option.name, index)
                sink.add(Diagnostic(BAD_CONFIGURATION, message, source, place, help=help))
                return config
    return changed


def _help(option: Option, word: str) -> str:
    if "\0" in word:
        return "remove the character U+0000: no path, name or address has it"
    if option.kind is Kind.CODES:
        return CODES_HELP
    from kcdsl.diagnostics.report import suggest

    return suggest(word, option.allowed)


def _unknown(key: str, origin: Origin) -> Diagnostic:
    from kcdsl.diagnostics.report import suggest

    message = f"there is no option `{key}`"
    help = suggest(key, [option.name for option in OPTIONS], "options")
    if key.replace("_", "-") in _OF_POLICIES:
        help = "who is trusted is said by the one who checks: `kcdsl check --policy FILE`"
    return Diagnostic(BAD_CONFIGURATION, message, origin.source, origin.span, help=help)


def _with(config: Config, option: Option, value: Any, origin: Origin) -> Config:
    origins = {**config.origins, option.name: origin}
    if option.kind is Kind.CODES:
        value = tuple(code_or_beginning(word) or word for word in value)
    return replace(config, **{option.field: value, "origins": origins})


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _fits(option: Option, value: Any) -> bool:
    match option.kind:
        case Kind.TEXT:
            return isinstance(value, str)
        case Kind.TRUTH:
            return isinstance(value, bool)
        case Kind.TEXTS | Kind.CODES:
            return isinstance(value, tuple) and all(isinstance(item, str) for item in value)


def _words(option: Option, value: Any) -> Iterator[tuple[tuple[int, ...], str]]:
    if isinstance(value, str):
        yield (), value
    elif option.kind in {Kind.TEXTS, Kind.CODES}:
        yield from (((index,), word) for index, word in enumerate(value))


def _allowed(option: Option, word: str) -> bool:
    if "\0" in word:
        return False
    if option.kind is Kind.CODES:
        return code_or_beginning(word) is not None
    if not option.allowed:
        return True
    return (word.partition("=")[0] if option.name == "format" else word) in option.allowed


def code_or_beginning(word: str) -> str | None:
    """Return a code, or the beginning of codes, as it is declared; None where no code fits."""
    name = RETIRED.get(word.upper(), word.upper())
    fits = _CODES.fullmatch(name) and any(code.id.startswith(name) for code in all_codes())
    return name if fits else None


def _example(option: Option) -> str | None:
    if option.allowed:
        return f"allowed: {', '.join(option.allowed)}"
    return {
        "allow-folders": 'such as ["."], the folder of the file and all below it',
        "metrics": 'such as ["package.metrics", "metrics.py"]',
        "ignore": 'such as ["KC208", "KC5"]',
        "select": 'such as ["KC208", "KC5"]',
        "exclude": 'such as ["drafts", "*/old-*.kc.yaml"]',
        "trusted-folders": 'such as ["~/contracts"]',
    }.get(option.name)


# --- the environment -----------------------------------------------------------------------------


def _from_environment(config: Config, option: Option, text: str, sink: Sink) -> Config:
    """Return the configuration with a variable; the items of a list are separated by commas."""
    value: Any = text
    match option.kind:
        case Kind.TEXTS | Kind.CODES:
            value = tuple(part.strip() for part in text.split(",") if part.strip())
        case Kind.TRUTH:
            value = truth(text)
        case _:
            pass
    if value is None or not all(_allowed(option, word) for _, word in _words(option, value)):
        message = f"{option.variable} is {text!r}"
        help = _example(option) or f"it takes {option.kind.value}"
        sink.add(Diagnostic(BAD_CONFIGURATION, message, help=help))
        return config
    return _with(config, option, value, Origin(Path(), variable=option.variable))


def truth(text: str) -> bool | None:
    """Return the truth value that a variable of the environment spells, or None."""
    word = text.strip().lower()
    if word in {"1", "true", "yes", "on"}:
        return True
    return False if word in {"", "0", "false", "no", "off"} else None
