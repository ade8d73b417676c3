"""The configuration from `kcdsl.toml`, `pyproject.toml` and the environment.

The file of the nearest folder with a `kcdsl.toml` or a `pyproject.toml` with `[tool.kcdsl]` is
used, upwards from the current folder or the contract; `kcdsl.toml` has priority in the same folder.
Environment variables override the file, and options of the command line override both.

The user's own file (`user_file`) has the lowest priority. Only it and the environment can set
options that a folder must not set for itself, such as the permission to run its code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kcdsl.diagnostics.codes import BAD_CONFIGURATION, all_codes
from kcdsl.diagnostics.model import Diagnostic, Refusal, Severity, Sink
from kcdsl.diagnostics.report import suggest
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.source.files import read_source, shown, user_place

FILES = (("kcdsl.toml", ()), ("pyproject.toml", ("tool", "kcdsl")))
"""The files of a folder, by priority, with the path to the section of kcdsl."""
CODES_HELP = "such as KC208 or KC5; `kcdsl explain` lists the codes"
_CODES = re.compile("KC[0-9]{0,3}")
_OF_POLICIES = frozenset({"trusted-keys", "threshold", "max-validity"})
_START = Span(0, 0)


class Colour(StrEnum):
    """The mode of coloured output."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class OptionType(StrEnum):
    """The type of an option's value, in words."""

    TEXT = "a text"
    TRUTH = "true or false"
    TEXTS = "a list of texts"
    CODES = "a list of codes, or of their beginnings"


class Option(NamedTuple):
    """An option of the configuration, declared by a field of `Config`.

    `allowed` lists its allowed words, if restricted. A `personal` option is not read from the file
    of a folder.
    """

    field: str
    kind: OptionType
    default: Any
    help: str
    allowed: tuple[str, ...] = ()
    example: str | None = None
    personal: bool = False

    @property
    def name(self) -> str:
        """Return its name in files, where `_` is equivalent to `-`."""
        return self.field.replace("_", "-")

    @property
    def variable(self) -> str:
        """Return its variable of the environment."""
        return f"KCDSL_{self.field.upper()}"

    @property
    def usage(self) -> str | None:
        """Return the allowed words, or an example of a value."""
        return f"allowed: {', '.join(self.allowed)}" if self.allowed else self.example

    def allows(self, word: str) -> bool:
        """Return whether a text may be its value, or an item of its list."""
        if "\0" in word:
            return False
        if self.kind is OptionType.CODES:
            return code_or_beginning(word) is not None
        return not self.allowed or word in self.allowed

    def fits(self, value: Any) -> bool:
        """Return whether a value of a file has its type."""
        match self.kind:
            case OptionType.TEXT:
                return isinstance(value, str)
            case OptionType.TRUTH:
                return isinstance(value, bool)
            case OptionType.TEXTS | OptionType.CODES:
                return isinstance(value, tuple) and all(isinstance(item, str) for item in value)

    def read(self, text: str) -> Any:
        """Return the value of an environment variable, with list items separated by commas; None
        for an invalid one."""
        value: Any = text
        if self.kind in {OptionType.TEXTS, OptionType.CODES}:
            value = tuple(part.strip() for part in text.split(",") if part.strip())
        elif self.kind is OptionType.TRUTH:
            return truth(text)
        return value if all(self.allows(word) for _, word in _words(value)) else None


class Origin(NamedTuple):
    """The origin of a value: a variable, a key of a file, or neither for the default.

    Relative paths in the value are relative to `folder`.
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
        span = self.span
        if self.source is None or span is None:
            return self.where
        return f"{self.source.name}:{self.source.position(span.start).line}"


def _text(default: Any, help: str, allowed: tuple[str, ...] = (), **more: Any) -> Any:
    declared = {"kind": OptionType.TEXT, "help": help, "allowed": allowed, **more}
    return field(default=default, metadata=declared)


def _texts(help: str, example: str | None = None, **more: Any) -> Any:
    declared = {"kind": OptionType.TEXTS, "help": help, "example": example, **more}
    return field(default=(), metadata=declared)


def _codes(help: str) -> Any:
    return _texts(help, 'such as ["KC208", "KC5"]', kind=OptionType.CODES)


@dataclass(frozen=True, slots=True)
class Config:
    """The values of all options; `origins` has the origins of given values, by option name.

    `file` is the configuration file of the folder, `own` that of the user; None if missing.
    """

    allow_folders: tuple[str, ...] = _texts(
        "folders whose files contracts may name as well",
        'such as ["."], the folder of the file and all below it',
    )
    color: str = _text(Colour.AUTO, "when output is coloured", tuple(Colour))
    contract: str | None = _text(None, "the contract of commands that are given none")
    docs_url: str | None = _text(None, "where the pages of codes are published: URL/KC203.md")
    exclude: tuple[str, ...] = _texts(
        "files that are left out of the folders given", 'such as ["drafts", "*/old-*.kc.yaml"]'
    )
    fail_on: str = _text(Severity.ERROR, "least severity that fails `kcdsl lint`", tuple(Severity))
    ignore: tuple[str, ...] = _codes("codes whose warnings and notes are not shown")
    metrics: tuple[str, ...] = _texts(
        "modules and files that declare metrics", 'such as ["package.metrics", "metrics.py"]'
    )
    refuse_suppressions: bool = field(
        default=False,
        metadata={"kind": OptionType.TRUTH, "help": "refuse contracts with accepted findings"},
    )
    register: str | None = _text(
        None, "the register that `kcdsl check` asks: a file or a URL", personal=True
    )
    select: tuple[str, ...] = _codes("the only codes whose warnings and notes are shown")
    trusted_folders: tuple[str, ...] = _texts(
        "folders whose contracts may run code of their own",
        'such as ["~/contracts"]',
        personal=True,
    )
    file: SourceFile | None = None
    own: SourceFile | None = None
    origins: Mapping[str, Origin] = field(default_factory=dict)

    def origin(self, name: str) -> Origin:
        """Return the origin of the value of an option."""
        return self.origins.get(name, Origin(Path()))

    @property
    def register_place(self) -> str | None:
        """Return the file or URL of the register; a relative file is resolved from its option."""
        if self.register is None or "://" in self.register:
            return self.register
        return str(self.origin("register").folder / Path(self.register).expanduser())

    def place(self, name: str, *path: int) -> Span | None:
        """Return the span of a value, or of an item of a list, in the file; None if unknown."""
        origin, value = self.origin(name), getattr(self, name.replace("-", "_"))
        if origin.source is None:
            return None
        for index in path:
            value = value[index]
        if not isinstance(value, str):
            return origin.span
        from kcdsl.source.toml import text_span

        return text_span(origin.source.text, (*origin.key, *path), value) or origin.span


OPTIONS = tuple(
    Option(f.name, default=f.default, **f.metadata) for f in fields(Config) if f.metadata
)
"""Every option, by name."""


def load_config(start: Path, environment: Mapping[str, str] | None = None) -> Config:
    """Return the configuration of a folder; raises Refusal for an invalid one."""
    sink = Sink()
    config = read_config(start, sink, environment)
    if sink.has_errors:
        raise Refusal(tuple(sink))
    return config


def read_config(start: Path, sink: Sink, environment: Mapping[str, str] | None = None) -> Config:
    """Return the configuration of a folder; invalid entries are reported and left out."""
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
        if text is None:
            continue
        value = option.read(text)
        if value is None:
            help = option.usage or f"it takes {option.kind}"
            message = f"{option.variable} is {text!r}"
            sink.add(Diagnostic(BAD_CONFIGURATION, message, help=help))
            continue
        config = _with(config, option, value, Origin(Path(), variable=option.variable))
    return config


def allowed_folders(start: Path, environment: Mapping[str, str] | None = None) -> tuple[Path, ...]:
    """Return the additional folders whose files the contracts of a folder may name.

    The variable of `allow-folders` and the user's own file may name any folder. Files of this
    folder and of its parents may name only folders below their own, so that a contract cannot bring
    its own permissions.
    """
    variables = os.environ if environment is None else environment
    option = next(o for o in OPTIONS if o.name == "allow-folders")
    named = [part.strip() for part in variables.get(option.variable, "").split(",")]
    mine, here = user_file(variables), start.resolve()
    if mine is not None and mine.is_file():
        named += _entries(option, mine, (), own=True)
    found = [Path(name).expanduser().resolve() for name in named if name]
    for file, section in _files_above(here, mine):
        found += [(file.parent / e).resolve() for e in _entries(option, file, section, own=False)]
    return tuple(found)


def _entries(option: Option, file: Path, section: tuple[str, ...], *, own: bool) -> tuple[str, ...]:
    """Return the entries of an option with texts in one file; none if it is invalid."""
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


def user_folder(environment: Mapping[str, str] | None = None) -> Path | None:
    """Return the folder of the user's own configuration; None where there is no home."""
    variables = os.environ if environment is None else environment
    folder = user_place("XDG_CONFIG_HOME", ".config", environment=variables)
    return None if folder is None else folder / "kcdsl"


def user_file(environment: Mapping[str, str] | None = None) -> Path | None:
    """Return the path of the user's own configuration; None without a home folder."""
    folder = user_folder(environment)
    return None if folder is None else (folder / "kcdsl.toml").resolve()


_SIZE_LIMIT = 2**18
"""Largest configuration in bytes."""
_ENTRIES = 100
"""The largest number of entries of a configuration."""
_DOTS = 200
"""The largest number of dots in a line of a configuration."""


def _files_above(folder: Path, mine: Path | None) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the configuration files of a folder and its parents, without the user's own."""
    for place in (folder, *folder.parents):
        for name, section in FILES:
            if (place / name).is_file() and place / name != mine:
                yield place / name, section


def _nearest(
    start: Path, sink: Sink, mine: Path | None
) -> tuple[SourceFile, Path, Mapping[str, Any]] | None:
    """Return the nearest file with a kcdsl section, its folder, and the section; not `mine`."""
    for file, section in _files_above(start.resolve(), mine):
        found = _read(file, section, sink)
        if found is not None:
            return found[0], file.parent, found[1]
    return None


@lru_cache(maxsize=4)
def _tables(text: str) -> Mapping[str, Any]:
    """Return the tables of a TOML text; cached, since a language server calls it at every edit."""
    import tomllib

    return tomllib.loads(text)


def _read(
    file: Path, section: tuple[str, ...], sink: Sink
) -> tuple[SourceFile, Mapping[str, Any]] | None:
    """Return the section of a file; None if it is missing or cannot be read."""
    try:
        source = read_source(shown(file), _SIZE_LIMIT)
    except Refusal as refusal:
        for diagnostic in refusal.diagnostics:
            sink.add(diagnostic)
        return None
    if section and section[-1] not in source.text:
        return None

    def unusable(message: str, span: Span = _START) -> tuple[SourceFile, Mapping[str, Any]]:
        help = "correct it there, or move the file away"
        sink.add(Diagnostic(BAD_CONFIGURATION, message, source, span, help=help))
        return source, {}

    import tomllib

    try:
        if any(line.count(".") > _DOTS for line in source.text.split("\n")):
            raise RecursionError  # parsing such a key takes quadratic time
        table: Any = _tables(source.text)
    except RecursionError:
        return unusable(f"{source.name} nests too deeply")
    except tomllib.TOMLDecodeError as error:
        from kcdsl.source.toml import error_span

        problem = str(error).partition(" (at ")[0]
        return unusable(f"{source.name} is not valid TOML: {problem}", error_span(source, error))
    except ValueError as error:  # a number of too many digits
        return unusable(f"{source.name} cannot be read: {error}")
    for number, key in enumerate(section):
        table = table.get(key)
        if table is None:
            return None
        if not isinstance(table, dict):
            path = section[: number + 1]
            return unusable(f"`{'.'.join(path)}` is not a table", _key_span(source, path))
    return source, table


def _key_span(source: SourceFile, path: tuple[str, ...]) -> Span:
    from kcdsl.source.toml import key_span

    return key_span(source.text, path) or _START


def _with_file(
    config: Config, source: SourceFile, folder: Path, table: Mapping[str, Any], sink: Sink
) -> Config:
    """Return the configuration with the entries of a file, which replace earlier values."""
    before = config.origins
    if len(table) > _ENTRIES:
        message = f"{source.name} has {len(table)} options, and there are {len(OPTIONS)}"
        sink.add(
            Diagnostic(
                BAD_CONFIGURATION,
                message,
                source,
                _START,
                help="leave out what is no option, or move the file away",
            )
        )
        return config
    config = replace(config, origins={})
    for key, value in table.items():
        config = _take(config, key, value, source, folder, sink)
    return replace(config, origins={**before, **config.origins})


def _take(
    config: Config, key: str, value: Any, source: SourceFile, folder: Path, sink: Sink
) -> Config:
    """Return the configuration with one entry of a file, or report an invalid entry."""
    origin = Origin(folder, source=source, key=(*dict(FILES)[Path(source.name).name], key))

    def unusable(message: str, help: str | None, place: Span | None = None) -> Config:
        at = place or origin.span
        sink.add(Diagnostic(BAD_CONFIGURATION, message, source, at, help=help))
        return config

    name = key.replace("_", "-")
    option = next((o for o in OPTIONS if o.name == name), None)
    if option is None:
        return unusable(f"there is no option `{key}`", _near(key))
    if option.personal and source is not config.own:
        mine = user_file()
        help = f"write it in {mine}" if mine is not None else f"set {option.variable}"
        return unusable(f"`{name}` is yours to say, not the folder's", help)
    if name in config.origins:
        return unusable(f"`{name}` is written twice, with `-` and with `_`", "remove one")
    given = tuple(value) if isinstance(value, list) else value
    if not option.fits(given):
        return unusable(f"`{key}` takes {option.kind}", option.usage)
    changed = _with(config, option, given, origin)
    wrong = [(path, word) for path, word in _words(given) if not option.allows(word)]
    for path, word in wrong:
        place = changed.place(name, *path)
        unusable(f"`{name}` cannot be `{word}`", _instead(option, word), place)
    if wrong:
        return config
    if option.field == "allow_folders" and source is not config.own:
        for index, entry in enumerate(given):
            if not (folder / entry).resolve().is_relative_to(folder.resolve()):
                return unusable(
                    f"`{entry}` is no folder below that of {Path(source.name).name}",
                    f"{option.variable}=FOLDER,… allows folders elsewhere",
                    changed.place(name, index),
                )
    return changed


def _instead(option: Option, word: str) -> str:
    """Return the help for a word that is not allowed."""
    if "\0" in word:
        return "remove the character U+0000: no path, name or address has it"
    if option.kind is OptionType.CODES:
        return CODES_HELP
    return suggest(word, option.allowed)


def _near(key: str) -> str:
    """Return the help for an unknown option."""
    if key.replace("_", "-") in _OF_POLICIES:
        return "trust is configured by the user who checks: `kcdsl check --policy FILE`"
    return suggest(key, [option.name for option in OPTIONS], "options")


def _with(config: Config, option: Option, value: Any, origin: Origin) -> Config:
    """Return the configuration with a value, which the caller has checked."""
    origins = {**config.origins, option.name: origin}
    if option.kind is OptionType.CODES:
        value = tuple(code_or_beginning(word) or word for word in value)
    return replace(config, **{option.field: value, "origins": origins})


def _words(value: Any) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield the texts of a value, each with its index where it is in a list."""
    if isinstance(value, str):
        yield (), value
    elif isinstance(value, tuple):
        yield from (((index,), word) for index, word in enumerate(value))


def code_or_beginning(word: str) -> str | None:
    """Return a declared code or prefix of codes; None where no code matches."""
    name = word.upper()
    fits = _CODES.fullmatch(name) and any(code.id.startswith(name) for code in all_codes())
    return name if fits else None


def truth(text: str) -> bool | None:
    """Return the truth value of the text of an environment variable, or None."""
    word = text.strip().lower()
    if word in {"1", "true", "yes", "on"}:
        return True
    return False if word in {"", "0", "false", "no", "off"} else None
