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
ONE_SYSTEM = HERMES.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}",
)
"""As Qwen3.5's."""
NO_SYSTEM = ONE_SYSTEM.replace(" and not loop.first", "")
"""As Gemma's."""
IN_TURNS = (
    "{% set ns = namespace(index=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
) + ONE_SYSTEM
"""As Mistral's."""
HOISTED = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = m.content %}{% endif %}{% endfor %}{{ ns.system }}"
    + TURNS.replace("CALLS", "").replace("{{ m.content }}", "{{ '' if m.role == 'system' else m.content }}")
)
"""As DeepSeek R1's: the last system message counts, and comes first."""
GEMMA = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ first if loop.first }}{{ m.content | trim }}<|im_end|>\n{% endfor %}"
)
"""As Gemma 3's: turns of two roles, and neither tools nor calls nor results."""
PHI = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
"""As Phi-3.5's: other roles are dropped."""
