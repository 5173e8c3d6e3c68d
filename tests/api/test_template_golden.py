"""Prompts of templates equal those of transformers."""

from __future__ import annotations

from typing import Any

import pytest

from pypto_serving.api.prompting.template import TemplateEncoder
from tests.api.checkpoint import CHATML, tiny_tokenizer
from tests.api.templates import HERMES, OPENED, SWITCHED
from tests.api.tool_samples import HELLO, NOW_TOOL, WEATHER_TOOL

pytestmark = pytest.mark.golden
ASSISTANT = {"role": "assistant", "content": "so far "}
CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": {"a": "é"}}}
DOCUMENTS = "{% if tools is none %}none{% endif %}{{ documents | tojson }}{{ messages[0].content }}"
TRIMS = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"

CASES: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = [
    (CHATML, [HELLO], {"add_generation_prompt": True}),
    (CHATML, [HELLO, ASSISTANT], {"continue_final_message": True}),
    (TRIMS, [HELLO, ASSISTANT], {"continue_final_message": True}),
    (OPENED, [HELLO], {"add_generation_prompt": True}),
    (SWITCHED, [HELLO], {"add_generation_prompt": True, "enable_thinking": False}),
    (HERMES, [HELLO], {"add_generation_prompt": True, "tools": [WEATHER_TOOL, NOW_TOOL]}),
    (HERMES, [HELLO, {"role": "assistant", "content": "", "tool_calls": [CALL]}], {"tools": [NOW_TOOL]}),
    (DOCUMENTS, [HELLO], {"documents": [{"title": "t", "text": "é"}]}),
]


@pytest.mark.parametrize(("template", "messages", "options"), CASES)
def test_prompts_equal_those_of_transformers(
    template: str, messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer())
    expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    given = {"add_generation_prompt": False, **options}
    assert TemplateEncoder(template, {}).encode(messages, given).prompt == expected
