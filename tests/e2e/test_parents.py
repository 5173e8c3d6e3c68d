"""What parents leave to the processes that they start: signals that are ignored or blocked, limits, closed streams."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from tests.e2e.ranks import followers
from tests.e2e.server import Server
from tests.needs import needs_kernels
from tests.thinning import some

pytestmark = pytest.mark.e2e

PYPTO = [sys.executable, "-m", "pypto_serving"]
EXEC = "os.execv(sys.argv[1], sys.argv[1:])"
OTHERS = "signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}"
IGNORES = f"import os, signal, sys\nfor each in {OTHERS}: signal.signal(each, signal.SIG_IGN)\n{EXEC}"
LIMITS = f"""import os, resource, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {OTHERS})
for limit, value in ((resource.RLIMIT_STACK, 256 << 10), (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))
{EXEC}"""
PARENTS: dict[str, Sequence[str]] = {
    "ignores": (sys.executable, "-c", IGNORES),
    "blocks, limits and closes": ("sh", "-c", 'exec "$@" <&- 2>&-', "sh", sys.executable, "-c", LIMITS),
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
ASKED = {
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 20,
    "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
}


def answer(server: Server) -> str:
    answered = server.http.post("/v1/chat/completions", json=ASKED)
    assert answered.status_code == 200, answered.text
    return str(answered.json()["choices"][0]["message"]["content"])


@needs_kernels
@pytest.mark.parametrize("parent", some(PARENTS, "blocks, limits and closes"))
def test_whatever_a_parent_left_grammars_work_dead_ranks_are_noticed_and_the_server_ends(parent: str) -> None:
    with Server("--max-model-len", "256", "--tp", "2", program=[*PARENTS[parent], *PYPTO]) as server:
        said = answer(server)
        assert said.replace(" ", "") in ('{"a":true}', '{"a":false}')
        killed_s = time.monotonic()
        followers(server.worker().pid)[0].kill()
        assert answer(server) == said
        assert time.monotonic() - killed_s < 30
        assert server.metric("pypto:worker_respawns_total") == 1


@pytest.mark.parametrize("left", ["signal.signal(signal.SIGCHLD, signal.SIG_IGN)", "os.closerange(0, 3)"])
def test_a_program_that_ignores_children_or_closed_its_streams_generates(left: str) -> None:
    """The library leaves the program's signals alone."""
    program = f"""
import os, signal, sys
out = os.dup(1)
{left}
from pypto_serving import LLM, SamplingParams, StructuredOutputsParams

params = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["yes"]))
with LLM(max_model_len=256, log_level="error") as llm:
    os.write(out, llm.generate("Hello", params)[0].outputs[0].text.encode())
os.write(out, str(signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN).encode())
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"yes{'SIGCHLD' in left}")
