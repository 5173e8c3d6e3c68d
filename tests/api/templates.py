"""Small chat templates with the marks of well-known ones; requests bring them."""

from __future__ import annotations

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}CALLS<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}" + TURNS.replace(
    "CALLS",
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}',
)


def with_tools(signs: str) -> str:
    """A template that describes tools, and has the `signs` of a form of calls."""
    return "{# " + signs + " #}{{ tools | tojson }}" + TURNS.replace("CALLS", "")


THINKS = TURNS.replace("CALLS", "")
"""The model writes both marks."""
OPENED = THINKS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
SWITCHED = THINKS.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}",
)
BARE = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
"""Its model begins to think at once."""
