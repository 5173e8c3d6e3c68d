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
LFM2 = (
    "{% set ns = namespace(system='') %}{% if messages[0].role == 'system' %}{% set ns.system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}{% if tools %}"
    "{% set ns.system = ns.system + '\nList of tools: <|tool_list_start|>[' %}{% for tool in tools %}"
    "{% set ns.system = ns.system + (tool | tojson) + (', ' if not loop.last else '') %}{% endfor %}"
    "{% set ns.system = ns.system + ']<|tool_list_end|>' %}{% endif %}"
    "{% if ns.system %}<|im_start|>system\n{{ ns.system }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '<|tool_response_start|>' if m.role == 'tool' }}"
    "{{ m.content }}{{ '<|tool_response_end|>' if m.role == 'tool' }}<|im_end|>\n{% endfor %}"
)
"""As LFM2's: tools and results are shown, calls are not."""
GRANITE = (
    "{% if tools %}<|im_start|>available_tools\n{{ tools | tojson(indent=4) }}<|im_end|>\n"
    "{# respond with <|tool_call|> followed by a JSON list #}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
"""As Granite 3.3's, likewise."""
KIMI = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>"
    "{% for c in m.tool_calls %}<|tool_call_begin|>functions.{{ c.function.name }}:{{ loop.index0 }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}<|im_end|>\n{% endfor %}"
)
"""As Kimi K2's."""
FIREFUNCTION = (
    "{% set suffix = 'write functools[{...}]\n' + functions + '\nToday is ' + datetime + '.' %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if loop.first %}{{ suffix }}{% endif %}"
    "{% if m.tool_calls %} functools[{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{{ ", " if not loop.last }}'
    "{% endfor %}]{% endif %}<|im_end|>\n{% endfor %}"
)
"""As Firefunction v2's: tools are a text of another name."""
PHI_4 = (
    "{% for m in messages %}{% if m.role == 'system' and 'tools' in m and m.tools is not none %}<|im_start|>system\n"
    "{{ m.content }}<|tool|>{{ m.tools }}<|/tool|><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}"
)
"""As Phi-4-mini's: tools are a text in the system message."""
ONE_CALL = HERMES.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}",
)
"""As Llama 3's."""
NEMO = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'user' and loop.last and system is defined %}{{ system }}\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{# {{ tools | tojson }} #}"
)
"""As Mistral Nemo's: the system message is in the last user turn, and lost after a result."""
MACROS = (
    "{% macro named() %}{{ tool.function.name + '' }}{% endmacro %}{# <tool_call> #}"
    "{% for tool in tools or [] %}{{ named() }}{% endfor %}"
) + TURNS.replace("CALLS", "")
"""As MiroThinker's for llama.cpp: with tools it fails."""
