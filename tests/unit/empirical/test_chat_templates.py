"""Chat messages: rendered as transformers does, in a sandbox, only by commands that run a model."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from kcdsl.diagnostics import Refusal
from kcdsl.model.files import Artefacts
from kcdsl.model.tokenizer import ByteTokenizer
from kcdsl_backends.empirical.collection import chat
from kcdsl_backends.empirical.collection.chat import renderer
from kcdsl_backends.requests import load_requests

CHATML = (
    "{{ bos_token }}{% for message in messages %}\n"
    "  {%- if message.role == 'tool' %}{% continue %}{% endif %}\n"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}\n"
    "{%- if message.role == 'assistant' %}{% generation %}{{ message.content | trim }}"
    "{% endgeneration %}{% else %}{{ message.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}\n"
    "{% if tools %}{{ tools | tojson }}{% endif %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "Bräuche <kurz>"},
    {"role": "user", "content": "Hi"},
    {"role": "tool", "content": "unseen"},
]
ANSWERED = [*MESSAGES, {"role": "assistant", "content": " Hello. "}]


def _render(folder: Path, row: dict[str, Any]) -> str:
    render = renderer("model.safetensors", Artefacts.of(folder), ByteTokenizer())
    return bytes(render(row)).decode("utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"")
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("tools", [None, [{"name": "größe", "values": [1, "<"]}]])
@pytest.mark.parametrize("messages", [MESSAGES, ANSWERED])
def test_rendered_rows_equal_those_of_transformers(
    folder: Path, messages: list[dict[str, str]], tools: Any
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    wanted = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=CHATML,
        add_generation_prompt=messages is MESSAGES,
        bos_token="<s>",
        eos_token="</s>",
    )[0][0]
    assert _render(folder, {"messages": messages, "tools": tools}) == wanted


def test_template_file_precedes_the_configuration(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages | length }}{{ eos_token }}")
    assert _render(folder, {"messages": MESSAGES}) == "3</s>"
    (folder / "chat_template.jinja").unlink()
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert _render(folder, {"messages": MESSAGES}) == "y"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ('{0.__class__.name}' | attr('format'))(messages) }}",
        "{{ namespace(f='{0.__class__.name}'.format).f(messages) }}",
        "{{ messages.append(1) }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'aaaaaaaaaaaaaaaa' * 9999 }}{% endfor %}",
        "{{ 'a' * 10000000000 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ '%99999999999d' % 1 }}",
        "{{ 'a' | center(99999999999) }}",
        "{{ [[1], [2]] | sum(start=[]) }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ strftime_now('%d %b %Y') }}",
        "{{ nothing.at.all }}",
        "{% if %}",
    ],
)
def test_forbidden_operations_of_templates_are_refused(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(Refusal) as error:
        _render(folder, {"messages": MESSAGES})
    assert "the chat template of" in str(error.value)


GROWN = "{% set n = namespace(x=START) %}{% for i in range(40) %}{% set n.x = STEP %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "steps"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
         "{% set x = f(60) %}", "steps"),
        (GROWN.replace("START", "'aaaa'").replace("STEP", "n.x ~ n.x"), "memory"),
        (GROWN.replace("START", "'aaaa'").replace("STEP", "n.x + n.x"), "memory"),
        (GROWN.replace("START", "'aaaa'").replace("STEP", "n.x.replace('a', n.x)"), "memory"),
        (GROWN.replace("START", "999999").replace("STEP", "n.x * n.x"), "bits"),
        ("{% set x = 'a'.ljust(10 * 999999999) %}", "memory"),
        ("{{ '%09999999999d' | format(1) }}", ""),
    ],
)  # fmt: skip
def test_steps_and_memory_of_templates_are_limited(folder: Path, template: str, said: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    before = sys.gettrace(), resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(Refusal) as error:
        _render(folder, {"messages": MESSAGES})
    assert said in str(error.value)
    assert (sys.gettrace(), resource.getrlimit(resource.RLIMIT_AS)) == before


def test_time_of_templates_is_limited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "{% set a = [0] * 999999 %}{% for i in range(99999) %}{% set b = a + a %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(long)
    monkeypatch.setattr(chat, "_SECONDS", 0.5)
    with pytest.raises(Refusal, match=r"it takes more than 0\.5 s for one row"):
        _render(folder, {"messages": MESSAGES})
    (folder / "chat_template.jinja").write_text("{{ [1, 2.5] | sum }} {{ [1] | sum(start=2) }}")
    assert _render(folder, {"messages": MESSAGES}) == "3.5 3"


def test_reading_commands_do_not_run_templates(folder: Path) -> None:
    path = folder / "requests.jsonl"
    path.write_text(json.dumps({"id": "a", "messages": MESSAGES}) + "\n")
    with pytest.raises(Refusal, match="no chat template of the checkpoint is run for it"):
        load_requests(path, path.name, ByteTokenizer().encode)
    render = renderer("model.safetensors", Artefacts.of(folder), ByteTokenizer())
    (found,) = load_requests(path, path.name, None, render=render).requests
    path.write_text(json.dumps({"id": "a", "messages": MESSAGES, "tokens": found.tokens}) + "\n")
    assert load_requests(path, path.name, None).requests[0].tokens == found.tokens
    assert load_requests(path, path.name, None, render=render).requests[0].tokens == found.tokens
    path.write_text(json.dumps({"id": "a", "messages": MESSAGES, "tokens": [1]}) + "\n")
    with pytest.raises(Refusal, match="differ from those of `messages`"):
        load_requests(path, path.name, None, render=render)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(Refusal, match="has no chat template"):
        _render(folder, {"messages": MESSAGES})


def _requests(folder: Path, line: str, template: str) -> list[bytes]:
    (folder / "chat_template.jinja").write_text(template)
    (folder / "rows.jsonl").write_text(line + "\n")
    render = renderer("model.safetensors", Artefacts.of(folder), ByteTokenizer())
    found = load_requests(
        folder / "rows.jsonl", "rows.jsonl", ByteTokenizer().encode, render=render
    )
    return [bytes(request.tokens) for request in found.requests]


def test_numbers_of_rows_are_rendered_as_in_python(folder: Path) -> None:
    line = (
        '{"id": "a", "messages": [{"role": "user", "t": 1e-7}], "tools": [{"least": 0.50, "n": 3}]}'
    )
    (text,) = _requests(folder, line, "{{ messages[0].t }} {{ tools | tojson }}")
    assert text == b'1e-07 [{"least": 0.5, "n": 3}]'


@pytest.mark.parametrize(
    ("more", "said"),
    [('"chat_template_kwargs": [1]', "no object"), ('"tokens": 5', "`tokens` differ")],
)
def test_invalid_fields_beside_messages_are_refused(folder: Path, more: str, said: str) -> None:
    line = f'{{"id": "a", "messages": [{{"role": "user", "content": "b"}}], {more}}}'
    with pytest.raises(Refusal, match=said):
        _requests(folder, line, "{{ messages[0].content }}")
