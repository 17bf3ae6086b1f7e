"""Chat templates: what they may use, which of them applies, and the prompt of a message that is to be continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.tokenizer.chat_template import ChatTemplate
from penstock.utils.errors import ConfigError, RequestError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "é"}}]
BEFORE = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def continued(source: str, content: str) -> str:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    template = ChatTemplate(source, {})
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert messages[-1]["content"] == content
    return text


@pytest.mark.parametrize("content", ["", "<", "e", "end", "|>", "<|im_end|>", "I am", "hi"])
def test_a_continued_message_stays_open_whatever_its_text(content: str) -> None:
    assert continued(CHATML, content) == BEFORE + content


def test_whitespace_at_the_end_of_a_continued_message_is_dropped() -> None:
    assert continued(CHATML, " I am \n") == f"{BEFORE} I am"
    assert continued(CHATML.replace("m.content", "m.content | trim"), " I am \n") == f"{BEFORE}I am"


def test_a_template_that_hides_the_last_message_cannot_continue_it() -> None:
    with pytest.raises(RequestError, match="verbatim"):
        continued("{{ messages[0].content }}", "I am")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", '{"type": "function", "function": {"name": "é"}}'),
        ("(separators=(',', ':'))", '{"type":"function","function":{"name":"é"}}'),
        ("(sort_keys=true)", '{"function": {"name": "é"}, "type": "function"}'),
        ("(ensure_ascii=true)", '{"type": "function", "function": {"name": "\\u00e9"}}'),
        ("(indent=1)", '{\n "type": "function",\n "function": {\n  "name": "é"\n }\n}'),
    ],
)
def test_tools_are_written_as_the_template_says(arguments: str, text: str) -> None:
    template = ChatTemplate(f"{{{{ tools[0] | tojson{arguments} }}}}", {})
    assert template.render(QUESTION, tools=TOOLS) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"city": "Bern"}', '{"city": "Bern"}'),
        ({"city": "Bern"}, '{"city": "Bern"}'),
        (" ", "{}"),
        ("[1]", '"[1]"'),
        ("{", '"{"'),
        ("[" * 100_000, None),
        ("9" * 4301, None),
    ],
)
def test_arguments_of_tool_calls_reach_the_template_as_objects(arguments: Any, text: str | None) -> None:
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | tojson }}", {})
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    message = {"role": "assistant", "tool_calls": [call]}
    assert template.render([message]) == (f'"{arguments}"' if text is None else text)
    assert call["function"]["arguments"] == arguments


@pytest.mark.parametrize("calls", [7, "text", [7], [{"function": 7}], [{"function": {"arguments": None}}]])
def test_tool_calls_of_another_form_are_left_to_the_template(calls: Any) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    assert ChatTemplate("{{ messages[0].tool_calls }}", {}).render([message]) == str(calls)


def test_marks_for_training_are_not_shown() -> None:
    text = "{{ m.content }}<|im_end|>\n"
    marked = CHATML.replace(text, f"{{% generation %}}{text}{{% endgeneration %}}")
    assert marked != CHATML
    assert ChatTemplate(marked, {}).render(QUESTION) == ChatTemplate(CHATML, {}).render(QUESTION)
    assert continued(marked, "I am") == BEFORE + "I am"


NAMED = [
    {"name": "default", "template": "plain {{ bos_token }}"},
    {"name": "tool_use", "template": "{{ bos_token }} {{ tools[0].function.name }}"},
]


@pytest.mark.parametrize("tokens", [{"bos_token": "<s>"}, {"bos_token": {"content": "<s>"}, "eos_token": None}])
def test_a_conversation_with_tools_has_its_own_template(tmp_path: Path, tokens: dict[str, Any]) -> None:
    config = {**tokens, "chat_template": NAMED}
    template = ChatTemplate.load(tmp_path, config)
    assert template is not None
    assert template.render(QUESTION) == "plain <s>"
    assert template.render(QUESTION, tools=TOOLS) == "<s> é"
    assert all(each["template"] in template.source for each in NAMED)


def test_templates_in_files_replace_those_of_the_configuration(tmp_path: Path) -> None:
    def render() -> tuple[str, str]:
        template = ChatTemplate.load(tmp_path, {"chat_template": NAMED})
        assert template is not None
        return template.render(QUESTION), template.render(QUESTION, tools=TOOLS)

    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert render() == ("file", "file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools of a file", encoding="utf-8")
    assert render() == ("file", "tools of a file")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{{ messages }}")
    with pytest.raises(ConfigError, match="a chat template in "):
        ChatTemplate.load(tmp_path, {})


def test_a_variable_does_not_replace_the_messages() -> None:
    assert ChatTemplate(CHATML, {}).render(QUESTION, messages=[]) == BEFORE
