"""Read the calls of Qwen3-Coder: `<tool_call><function=f><parameter=a>...</parameter></function></tool_call>`.

Values are plain text; the tool's JSON schema says what they stand for.
"""

from __future__ import annotations

import re

from pypto_serving.api.chat.parsers.recovery import Markup
from pypto_serving.api.chat.parsers.tagged import Tags

START, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER_END = "</parameter>"
STARTS = (START, FUNCTION)
NAME = re.compile(r"[^\s<>=][^<>\n]{0,250}")
_TAG = re.compile(rf"<([^\s<>=]{{1,12}})=+({NAME.pattern})>(?:>(?=\n))?")
_TAGS = Tags(
    _TAG, _TAG, ("function", "parameter"), (PARAMETER_END, FUNCTION_END, END), starts=STARTS, values_have_lines=True
)
MARKUP = Markup(_TAGS.read, starts=(START,), heads=(FUNCTION,), ends=(FUNCTION_END, END), opener="<")
