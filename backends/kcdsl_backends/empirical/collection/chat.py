"""Chat templates: rows of messages to text, as transformers renders it.

A template is code of the checkpoint. It is run only by commands that run the model too, in jinja2's
immutable sandbox: no attribute that begins with an underscore, no change of its inputs. It has no
clock, since a row must always give the same tokens, and limits of steps, time and memory.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kcdsl.diagnostics import codes, refuse
from kcdsl.model.files import Artefacts, companion
from kcdsl.model.tokenizer import Tokenizer
from kcdsl.source.files import excerpt, shown

_LARGEST = 16 * 2**20
"""Largest number of bytes of a template, or of the text of one row."""
_LONGEST = 10**6
"""Largest length of the result of a product in a template."""
_BITS = 4096
"""Largest number of bits of a product of integers in a template."""
_STEPS = 10**7
"""Largest number of lines of Python that a template may run for one row: a few seconds."""
_SECONDS = 60.0
"""Most processor seconds for one row: a step may copy a long list. One call is not interrupted."""
_BETWEEN = 64
"""Steps between two looks at the clock."""
_MEMORY = 2**29
"""Largest number of bytes that a template may allocate, on systems with such a limit."""
_FAULTS = (
    TypeError, ValueError, RecursionError, ArithmeticError, LookupError, AttributeError, MemoryError
)  # fmt: skip
_SPECIAL = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The template of a checkpoint, with the special tokens that it may name."""

    path: Path
    text: str
    special: Mapping[str, str]

    def render(self, row: Mapping[str, Any], template: Any) -> str:
        """Return the text of a row with `messages`.

        Raises Refusal for a template that fails on it, or writes more than 16 MiB.
        """
        from jinja2 import TemplateError

        messages, settings = row["messages"], row.get("chat_template_kwargs") or {}
        if not isinstance(settings, dict):
            raise self.refusal("is given `chat_template_kwargs` that are no object")
        given = {
            **self.special,
            "tools": row.get("tools"),
            "documents": row.get("documents"),
            "add_generation_prompt": row.get(
                "add_generation_prompt", messages[-1].get("role") != "assistant"
            ),
            **settings,
        }
        parts: list[str] = []
        size = 0
        try:
            with _limited():
                for part in template.generate(messages=messages, **given):
                    parts.append(part)
                    size += len(part)
                    if size > _LARGEST:
                        raise self.refusal("writes more than 16 MiB for one row")
        except MemoryError:
            raise self.refusal("takes more than 512 MiB of memory for one row") from None
        except (*_FAULTS, TemplateError) as error:
            raise self.refusal(f"fails on the row: {excerpt(error, 200)}") from None
        return "".join(parts)

    def compiled(self) -> Any:
        """Return the compiled template; raises Refusal for an invalid one."""
        from jinja2 import TemplateError

        try:
            environment = _environment()
            with _limited():
                return environment.from_string(self.text)
        except (*_FAULTS, TemplateError) as error:
            raise self.refusal(f"is no template: {excerpt(error, 200)}") from None

    def refusal(self, what: str) -> Exception:
        """Return the refusal of the template."""
        return refuse(
            codes.TOKENIZER,
            f"the chat template of {shown(self.path)} {what}",
            help="give the row its `tokens`, as the trainer counted them",
        )


def renderer(
    checkpoint: str, files: Artefacts, tokenizer: Tokenizer
) -> Callable[[Mapping[str, Any]], Sequence[int]]:
    """Return the function from a row with `messages` to its tokens. The template of the checkpoint
    is read and compiled at the first such row.

    The template gets `tools`, `documents`, `add_generation_prompt` and `chat_template_kwargs` of
    the row. The default of `add_generation_prompt` is true if the last message is not of the
    assistant.
    """

    @cache
    def found() -> tuple[ChatTemplate, Any]:
        path = files.locate(checkpoint)
        chat = chat_template(path, files)
        if chat is None:
            raise refuse(
                codes.TOKENIZER,
                f"the row has `messages`, and {shown(path)} has no chat template",
                help="add its chat_template.jinja or tokenizer_config.json, or give `tokens`",
            )
        return chat, chat.compiled()

    def render(row: Mapping[str, Any]) -> Sequence[int]:
        chat, template = found()
        return tokenizer.encode_rendered(chat.render(row, template))

    return render


def chat_template(checkpoint: Path, files: Artefacts) -> ChatTemplate | None:
    """Return the template beside a checkpoint: chat_template.jinja, else the `chat_template` of
    tokenizer_config.json (of several, that named `default`); None if there is none."""
    path = files.beside(checkpoint, "tokenizer_config.json")
    config: dict[str, Any] = {}
    if path is not None:
        try:
            found = json.loads(files.read(path, companion("tokenizer_config"), _LARGEST))
        except (ValueError, RecursionError) as error:
            raise refuse(
                codes.TOKENIZER,
                f"{shown(path)} is no JSON: {error}",
                help="restore the file from where the checkpoint came from",
            ) from None
        config = found if isinstance(found, dict) else {}
    special = {name: text for name in _SPECIAL if (text := _text_of(config.get(name))) is not None}
    own = files.beside(checkpoint, "chat_template.jinja")
    if own is not None:
        data = files.read(own, companion("chat_template"), _LARGEST)
        return ChatTemplate(own, data.decode("utf-8", errors="replace"), special)
    stated = config.get("chat_template")
    if isinstance(stated, list):
        named = {t.get("name"): t.get("template") for t in stated if isinstance(t, dict)}
        stated = named.get("default")
    return (
        ChatTemplate(path, stated, special)
        if path is not None and isinstance(stated, str)
        else None
    )


def _text_of(token: Any) -> str | None:
    """Return the text of a special token: a string, or an object with its `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


@contextmanager
def _limited() -> Iterator[None]:
    """Limit the lines of Python that run in this thread, their time, and the memory of the
    process."""
    from jinja2 import TemplateError

    left, before, end = _STEPS, sys.gettrace(), time.thread_time() + _SECONDS

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise TemplateError(f"it takes more than {_STEPS} steps for one row")
        if left % _BETWEEN == 0 and time.thread_time() > end:
            raise TemplateError(f"it takes more than {_SECONDS:g} s for one row")
        return count

    with _memory_limited():
        sys.settrace(count)
        try:
            yield
        finally:
            sys.settrace(before)


@contextmanager
def _memory_limited() -> Iterator[None]:
    """Limit the address space to what the process has now, and `_MEMORY`."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):  # not on this system
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + _MEMORY
    if soft == resource.RLIM_INFINITY or most < soft:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _environment() -> Any:
    from jinja2 import TemplateError, nodes, pass_environment
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.filters import do_sum
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        """The sandbox of jinja2, in which products cannot make long values."""

        intercepted_binops = frozenset({"*", "**", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            plain = isinstance(left, int | float) and isinstance(right, int | float)
            if operator == "*" and not plain:
                size = len(left) * right if isinstance(right, int) else left * len(right)
                if size > _LONGEST:
                    raise SecurityError(f"a product of {size} items")
            elif operator == "*" and isinstance(left, int) and isinstance(right, int):
                if left.bit_length() + right.bit_length() > _BITS:
                    raise SecurityError(f"a product of more than {_BITS} bits")
            elif operator == "**" or not plain:
                raise SecurityError(f"`{operator}` of these values is not allowed")
            return super().call_binop(context, operator, left, right)

    class Generation(Extension):
        """The tag that marks text of the assistant; it renders its content unchanged."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise TemplateError(str(message))

    def strftime_now(format: str) -> None:
        raise TemplateError("it reads the clock: the same row would not be the same tokens")

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    @pass_environment
    def total(environment: Any, values: Any, attribute: Any = None, start: Any = 0) -> Any:
        if not isinstance(start, int | float):
            raise SecurityError("`sum` of anything but numbers")  # quadratic, in one call
        return do_sum(environment, values, attribute, start)

    found = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    found.filters |= {"tojson": tojson, "sum": total}
    del found.filters["center"]  # of any width
    found.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return found
