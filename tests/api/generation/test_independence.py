"""The internal form of a generation, and the offline API above it, load no HTTP framework and no endpoint."""

from __future__ import annotations

import subprocess
import sys


def test_generation_and_offline_api_load_no_http() -> None:
    code = (
        "import sys, pypto_serving.offline.llm\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('starlette', 'uvicorn')"
        " or m.startswith('pypto_serving.api.openai')))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
