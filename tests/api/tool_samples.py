"""Tools, and outputs that call them in the forms of several families."""

from __future__ import annotations

from pypto_serving.api.chat.parsers.scanner import ParsedCall

HELLO = {"role": "user", "content": "hello"}
_KINDS = {"city": "string", "days": "integer", "where": "object", "exact": "boolean"}
PROPERTIES = {name: {"type": kind} for name, kind in _KINDS.items()}
WEATHER_TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": PROPERTIES}},
}
NOW_TOOL = {"type": "function", "function": {"name": "now"}}

TYPES = {
    "get_weather": {"city": ["string"], "days": ["integer"], "where": ["object", "null"], "exact": ["boolean"]},
    "now": {},
}
CITY = '{"city": "Paris \\"é\\" {"}'
HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}\n</tool_call>'
HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CODER = (
    '<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n"é" {\n</parameter>\n'
    '<parameter=days>\n3\n</parameter>\n<parameter=where>\n{"a": [1]}\n</parameter>\n'
    "<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>"
)
CODER_NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
CODER_CALL = ParsedCall("get_weather", '{"city": "Paris\\n\\"é\\" {", "days": 3, "where": {"a": [1]}, "exact": true}')
V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    f"```json\n{CITY}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
V31 = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{CITY}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
KIMI = (
    f"<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{CITY}"
    "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
LITERALS = '{"x": -1, "y": [true, null], "z": {"k": [1.5]}}'
WEATHER = ParsedCall("get_weather", CITY)
NOW = ParsedCall("now", "{}")
PARAMETERS = f'{{"name": "get_weather", "parameters": {CITY}}}'
ARGUMENTS = f'{{"name": "get_weather", "arguments": {CITY}}}'
