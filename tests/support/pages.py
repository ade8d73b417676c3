"""Read and run the examples of the pages of diagnostic codes.

Fenced blocks are examples:

- `yaml bad at="…"` and `yaml good` are contracts; a base contract supplies sections they lack.
  `at` is the text that the finding covers;
- `file NAME` writes a file, `python` is run where files of bytes are needed (`python bad` ends with
  a refusal), and `console bad` and `console good` hold commands with what they print: lines
  `$ kcdsl …`, or `$ NAME=VALUE kcdsl …` for a variable of the environment;
- `varies="…"` is a pattern of what differs from run to run; blanks do not count there;
- `planted="module.name=expression"` shows a defect or a lack that no input has: what `name` gives
  is replaced by the value of the expression while the commands run.

In what a command prints, `…` stands for any text in its line, and for any lines where it stands
alone. The folder `tiny_lm` is that of `examples/tiny_lm`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import kcdsl
from kcdsl.check.compile import analyse
from kcdsl.diagnostics.model import Diagnostic, Sink
from kcdsl.diagnostics.pages import FENCE
from kcdsl.diagnostics.spans import SourceFile
from tests.support.commands import ANNOTATING, PLAIN_TERMINAL
from tests.support.configurations import DECODER_TEXT

BASE = {
    "kcdsl": "kcdsl: 1\n",
    "contract": "contract: example\n",
    "version": "version: 1.0.0\n",
    "model": "model: {checkpoint: model.safetensors, architecture: llama}\n",
    "kernels": "kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}\n",
    "data": "data: requests.jsonl\n",
    "slices": 'slices:\n  all: {}\n  long: {where: "length > 128"}\n',
    "clauses": "clauses:\n  BASE: {require: mean(tv) <= 5%, slices: [long], level: L1}\n",
}
"""The default sections of an example."""
_OPTION = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
PAGES = Path(kcdsl.__file__).parent / "diagnostics" / "pages"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY_LM = ("model.safetensors", "config.json", "contract.yaml", "prompts.jsonl")
FILES = ("model.safetensors", "requests.jsonl", "config.json", "tokenizer.json")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, its kind (such as `bad` or `good`), and its text.

    `at` is the text that the finding of a bad contract covers, `varies` a pattern of output that
    differs between runs, `planted` the planted defect, and `name` the name of a file. `start` and
    `end` delimit the whole block with its fences.
    """

    language: str
    kind: str
    text: str
    at: str | None = None
    name: str | None = None
    varies: str | None = None
    planted: str | None = None
    start: int = 0
    end: int = 0


def names() -> tuple[str, ...]:
    """Return the codes that have a page."""
    return tuple(sorted(path.stem for path in PAGES.glob("*.md")))


def sections(text: str) -> tuple[str, ...]:
    """Return the headings of the sections of a page."""
    prose = FENCE.sub("", text).splitlines()
    return tuple(line[3:].strip() for line in prose if line.startswith("## "))


def blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    for fence in FENCE.finditer(text):
        language, _, rest = fence[1].strip().partition(" ")
        options = {
            name: value.replace('\\"', '"').replace("\\n", "\n")
            for name, value in _OPTION.findall(rest)
        }
        words = rest.split()
        kind = words[0] if words and words[0] in {"bad", "good", "roughly"} else ""
        yield Block(
            language,
            kind,
            fence[2],
            options.get("at"),
            rest.strip() if language == "file" else None,
            options.get("varies"),
            options.get("planted"),
            fence.start(),
            fence.end(),
        )


def stand_in(folder: Path) -> None:
    """Write the default files, which contain nothing but a configuration."""
    for name in FILES:
        (folder / name).write_text(DECODER_TEXT if name == "config.json" else "")


def completed(text: str) -> str:
    """Return an example with the base sections that it leaves out, which are put before it.

    An example that begins with `kcdsl:` or is no mapping of sections is returned unchanged.
    """
    first = text.lstrip()
    whole = first.startswith(("kcdsl:", "%", "---", "- ", "[", "{")) or not first
    starts = {line.split(":")[0].strip("'\" ") for line in text.splitlines() if line[:1].strip()}
    if whole or not starts & {*BASE, "escalation", "constants", "tables", "imports"}:
        return text
    return text + "".join(part for name, part in BASE.items() if name not in starts)


def found(text: str, folder: Path) -> tuple[SourceFile, list[Diagnostic]]:
    """Return the findings of an example in a folder with the default files."""
    stand_in(folder)
    source, sink = SourceFile("contract.yaml", completed(text)), Sink()
    analyse(source, sink, folder)
    return source, sink.found


@dataclass(frozen=True, slots=True)
class Command:
    """A line `$ NAME=VALUE… kcdsl WORDS…` of a console block, with its expected output."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    output: str


def consoles(text: str) -> list[Command]:
    """Return the commands of a console block."""
    runs: list[Command] = []
    for line in text.splitlines(keepends=True):
        if line.startswith("$ "):
            words = shlex.split(line[2:], comments=True)
            program = words.index("kcdsl")
            pairs = (word.partition("=") for word in words[:program])
            environment = {name: value for name, _, value in pairs}
            runs.append(Command(tuple(words[program + 1 :]), environment, ""))
        elif runs:
            runs[-1] = replace(runs[-1], output=runs[-1].output + line)
    return runs


def prepare(block: Block, folder: Path) -> None:
    """Write the file of a block `file NAME`; run a block `python`, which makes files of bytes."""
    if block.language == "file":
        assert block.name
        path = folder / block.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
    elif block.language == "python":
        with contextlib.chdir(folder):
            exec(compile(block.text, "example", "exec"), {"__name__": "__example__"})


def provide(blocks: Sequence[Block], folder: Path) -> None:
    """Put the model of the examples in place where a page mentions it."""
    if any("tiny_lm/" in block.text for block in blocks):
        (folder / "tiny_lm").mkdir()
        for name in TINY_LM:
            shutil.copy(EXAMPLES / "tiny_lm" / name, folder / "tiny_lm" / name)


def run_planted(defect: str, words: Sequence[str], folder: Path) -> str:
    """Return the output of a command with `module.name` wrapped by a planted expression."""
    target, _, expression = defect.partition("=")
    module, _, name = target.rpartition(".")
    program = (
        f"import sys, {module}\n"
        f"assert hasattr({module}, {name!r})\n"
        f"{target} = lambda *given, **named: {expression}\n"
        "sys.argv[0] = 'kcdsl'\n"
        "from kcdsl.cli import main\n"
        "sys.exit(main())\n"
    )
    outer = {key: value for key, value in os.environ.items() if key not in ANNOTATING}
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=folder,
        env={**outer, **PLAIN_TERMINAL},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
    return done.stdout


@contextlib.contextmanager
def forget_modules(folder: Path) -> Iterator[None]:
    """Forget imported modules of a folder, because the next example has other versions."""
    known = set(sys.modules)
    try:
        yield
    finally:
        for name in set(sys.modules) - known:
            origin = getattr(sys.modules[name], "__file__", None)
            if origin is not None and Path(origin).is_relative_to(folder):
                del sys.modules[name]


def agrees(shown: str, printed: str, *, roughly: bool = False) -> bool:
    """Return whether a page shows the output.

    `…` stands for any text in its line, and for any lines where it is alone. Trailing blanks do not
    count. With `roughly`, a number with a fraction may differ by a factor of 3, a tiny one by 9,
    and runs of blanks are equal.
    """
    numbers: list[float] = []
    lines = (line.rstrip() for line in shown.splitlines())
    pattern = "".join(_pattern(line, numbers if roughly else None) for line in lines)
    plain = "".join(f"{_words(line, roughly)}\n" for line in printed.splitlines())
    found = re.fullmatch(pattern, plain)
    if found is None:
        return False
    return all(
        _near(float(text), number) for text, number in zip(found.groups(), numbers, strict=True)
    )


_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+)(?!\w)")


def _words(line: str, roughly: bool) -> str:
    return " ".join(line.split()) if roughly else line.rstrip()


def _pattern(line: str, numbers: list[float] | None) -> str:
    """Return the pattern of a line; append its numbers, each with a group, to `numbers`."""
    if line == "…":
        return r"(?:.*\n)*"
    parts, last, line = [], 0, _words(line, numbers is not None)
    found = numbers if numbers is not None else []
    for number in _NUMBER.finditer(line) if numbers is not None else ():
        parts += [re.escape(line[last : number.start()]), r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"]
        found.append(float(number[0]))
        last = number.end()
    parts.append(re.escape(line[last:]))
    return "".join(parts).replace("…", ".*") + r"\n"


_TINY = 1e-9
"""A divergence this small is the square of a float32 rounding drift, so its relative error is
squared."""


def _near(one: float, other: float) -> bool:
    least, most = sorted((one, other))
    return one == other or (least > 0 and most <= (3 if most > _TINY else 9) * least)


def without_variation(printed: str, varies: str | None) -> str:
    """Return the output with matches of the pattern `varies` and adjacent blanks removed."""
    if varies is None:
        return printed
    lines = re.sub(varies, "…", printed).splitlines()
    return "".join(" ".join(line.split()) + "\n" for line in lines)
