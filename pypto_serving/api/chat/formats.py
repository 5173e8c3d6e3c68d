"""The formats of outputs that need parsing, one struct per family. Called, each makes the parser of one output."""

from __future__ import annotations

from pypto_serving.api.chat.deepseek_v4_output import DeepseekV4Format

OutputFormat = DeepseekV4Format
