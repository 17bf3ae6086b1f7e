"""Chat templates: the prompt of a message that is to be continued."""

from __future__ import annotations

import pytest

from penstock.tokenizer.chat_template import ChatTemplate
from penstock.utils.errors import RequestError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
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
