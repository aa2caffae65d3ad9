"""Chat templates: the sandbox, content formats, roles, tool arguments and open last messages."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvferry_server.errors import BadRequestError
from kvferry_server.settings import ContentFormat, SettingsError
from kvferry_server.text.content_format import detect_content_format
from kvferry_server.text.messages import normalise_messages
from kvferry_server.text.template_environment import TemplateEnvironment
from kvferry_server.text.templates import ChatTemplateOptions, ChatTemplates
from server.kit_gateway import CHATML, make_bundle

PARTS = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"


def render(
    template: str | None,
    messages: list[dict[str, Any]],
    *,
    override: str | None = None,
    timeout_s: float = 5.0,
    templates: dict[str, str] | None = None,
    **options: Any,
) -> str:
    bundle = make_bundle(chat_templates=templates or ({} if template is None else {"default": template}))
    chat = ChatTemplates(bundle, override=override, content_format=ContentFormat.AUTO, timeout_s=timeout_s)
    chosen = ChatTemplateOptions(**options)
    compiled = chat.prepare(chosen)
    normal = normalise_messages(
        messages, content_format=compiled.content_format, knows_developer_role=compiled.knows_developer_role
    )
    return chat.render(compiled, normal, chosen)


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def test_chatml_opens_the_assistant_turn() -> None:
    assert render(CHATML, [user("hi")]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, [user("hi")], add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ContentFormat.STRING),
        (PARTS, ContentFormat.OPENAI),
        (
            "{% set ms = messages[1:] %}{% for m in ms %}{% for p in m['content'] %}{% endfor %}{% endfor %}",
            ContentFormat.OPENAI,
        ),
        (
            "{% for m in messages %}{% set c = m.content %}{% for p in c %}{% endfor %}{% endfor %}",
            ContentFormat.OPENAI,
        ),
        (
            "{% macro show(c) %}{% for p in c %}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            ContentFormat.OPENAI,
        ),
        ("{% for m in messages %}{% for call in m.tool_calls %}{% endfor %}{% endfor %}", ContentFormat.STRING),
        ("{% for p in messages[0].content.split('x') %}{% endfor %}", ContentFormat.STRING),
    ],
)
def test_the_content_format_is_read_from_the_template(template: str, expected: ContentFormat) -> None:
    assert detect_content_format(TemplateEnvironment(), template) is expected


def test_text_parts_are_joined_with_line_breaks_for_text_templates() -> None:
    parts = ["a", {"type": "text", "text": "b"}, {"type": "input_text", "text": "c"}, {"text": "d"}]

    assert "a\nb\nc\nd" in render(CHATML, [user(parts)])


def test_parts_stay_parts_for_part_templates() -> None:
    assert render(PARTS, [user([{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}])]) == "[a][b]"


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"input_audio": {"data": ""}}])
def test_media_parts_are_refused(part: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match="not a multimodal model"):
        render(CHATML, [user([part])])


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(BadRequestError, match="Unknown content part type 'smell'"):
        render(CHATML, [user([{"type": "smell"}])])


def test_missing_content_is_empty() -> None:
    assert render("{% for m in messages %}<{{ m.content }}>{% endfor %}", [{"role": "assistant"}]) == "<>"


def test_developer_becomes_system_and_system_messages_merge_when_the_template_does_not_know_it() -> None:
    messages = [{"role": "system", "content": "a"}, user("u"), {"role": "developer", "content": "b"}]
    show = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"

    assert render(show, messages) == "system:a\n\nb;user:u;"
    assert render(show + "{# developer #}", messages) == "system:a;user:u;developer:b;"


@pytest.mark.parametrize(
    ("arguments", "shown"), [('{"x": [1, "é"]}', '{"x": [1, "é"]}'), ("not json", "{}"), (None, "{}"), ("", "{}")]
)
def test_tool_arguments_are_objects(arguments: str | None, shown: str) -> None:
    template = "{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}

    assert render(template, [{"role": "assistant", "tool_calls": [call]}]) == shown


def test_reasoning_content_is_also_called_reasoning() -> None:
    message = {"role": "assistant", "content": "", "reasoning_content": "why"}

    assert render("{{ messages[0].reasoning }}{{ messages[0].reasoning_content }}", [message]) == "whywhy"


def test_hugging_face_extras_work() -> None:
    template = (
        "{{ {'a': '<b>'} | tojson }}{% generation %}x{% endgeneration %}{{ strftime_now('%Y') | length }}"
        "{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}{{ eos_token }}"
    )

    assert render(template, [user("")]) == '{"a": "<b>"}x401<|im_end|>'


def test_a_template_that_refuses_is_a_bad_request_with_its_words() -> None:
    with pytest.raises(BadRequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", [user("")])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 + 'a' }}",
        "{{ 'a' * 10**9 }}",
        "{{ 'a' * 1000000000 }}",
        "{{ 'a'.center(1000000000) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 1 / 0 }}",
        "{% for",
    ],
)
def test_hostile_and_broken_templates_end_soon_with_a_bad_request(template: str) -> None:
    started = time.monotonic()

    with pytest.raises(BadRequestError):
        render(template, [user("")], timeout_s=0.3)

    assert time.monotonic() - started < 5


def test_attributes_of_python_objects_are_out_of_reach() -> None:
    assert render("{{ messages.__class__ }}{{ ''.format.__self__ }}", [user("")]) in ("", "None")


def test_the_final_message_can_be_left_open() -> None:
    messages = [user("count"), {"role": "assistant", "content": "one, two, "}]

    text = render(CHATML, messages, continue_final_message=True, add_generation_prompt=False)

    assert text.endswith("<|im_start|>assistant\none, two, ")


def test_a_template_that_trims_ends_the_open_message_without_its_blanks() -> None:
    trimming = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"

    text = render(
        trimming, [{"role": "assistant", "content": "one "}], continue_final_message=True, add_generation_prompt=False
    )

    assert text == "assistant: one"


def test_a_template_that_hides_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(BadRequestError, match="cannot be continued"):
        render("nothing", [user("x")], continue_final_message=True, add_generation_prompt=False)


def test_no_template_is_a_bad_request() -> None:
    with pytest.raises(BadRequestError, match="default chat template is no longer allowed"):
        render(None, [user("x")])


def test_the_setting_may_be_a_name_a_text_or_a_file(tmp_path: Any) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("from a file")

    assert render(None, [user("x")], templates={"default": "a", "other": "b"}, override="other") == "b"
    assert render("a", [user("x")], override="{{ 'text' }}") == "text"
    assert render("a", [user("x")], override=str(file)) == "from a file"
    with pytest.raises(SettingsError, match="no readable file"):
        render("a", [user("x")], override=str(tmp_path / "missing"))


def test_variables_of_the_request_reach_the_template_but_not_the_messages() -> None:
    text = render("{{ mood }}{{ messages | length }}", [user("x")], variables={"mood": "calm", "messages": []})

    assert text == "calm1"
