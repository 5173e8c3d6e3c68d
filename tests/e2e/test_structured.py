"""Structured outputs on real processes: every answer matches, whatever the schedule."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jsonschema
import msgspec
import openai
import psutil
import pydantic
import pytest

from pypto_serving import LLM, SamplingParams, StructuredOutputsParams
from pypto_serving.api.grammars.json_schema import prepare
from pypto_serving.engine.async_engine import AsyncEngine
from pypto_serving.errors import RequestError
from pypto_serving.guidance import checked
from pypto_serving.types.guide import Grammar, Guide, Reasoning
from pypto_serving.types.request import RequestFault, RequestOutput
from tests.checkpoints import NUM_BYTES, byte_ids, make_checkpoint
from tests.e2e.engines import QUICK_FAULTS, Killer, answers, engine_config, requests_of, run_engine
from tests.e2e.server import Server
from tests.schemas import SchemaMaker, ambiguous_grammar

pytestmark = pytest.mark.e2e

END = NUM_BYTES + 2
FORMATS = jsonschema.FormatChecker([name for name in jsonschema.FormatChecker.checkers if name != "time"])
"""jsonschema's own check of times refuses the zone that RFC 3339 asks for."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), dtype="bfloat16")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), max_model_len=2048, kv_memory="256MiB", log_level="warning") as loaded:
        yield loaded


def sweep(llm: LLM, seeds: range) -> Counter[str]:
    """Complete random schemas, 64 at once; each complete answer must validate."""
    found: Counter[str] = Counter()
    for start in range(seeds.start, seeds.stop, 64):
        schemas = [SchemaMaker(seed).make() for seed in range(start, min(start + 64, seeds.stop))]
        taken = [schema for schema in schemas if is_taken(schema)]
        found["refused"] += len(schemas) - len(taken)
        asked = [
            SamplingParams(seed=i, max_tokens=1500, structured_outputs=StructuredOutputsParams(json=schema))
            for i, schema in enumerate(taken)
        ]
        for schema, result in zip(taken, llm.generate(["x"] * len(asked), asked), strict=True):
            output = result.outputs[0]
            found[output.finish_reason or ""] += 1
            if output.finish_reason == "stop":
                jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(output.text))
    return found


def is_taken(schema: dict[str, Any]) -> bool:
    """Whether a random schema can be satisfied and honoured; its refusal says why not."""
    try:
        checked(Grammar("json_schema", json.dumps(prepare(schema, {}))))
    except RequestError as error:
        assert re.search(r"unsatisfiable|nothing can match|Properties|stack level", str(error), re.I), error
        return False
    return True


def test_answers_validate_or_their_schema_is_refused(llm: LLM) -> None:
    found = sweep(llm, range(40))
    assert found["stop"] > 33 and found["length"] < 3, found


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_thousands_of_answers_validate(llm: LLM) -> None:
    found = sweep(llm, range(1000, 6000))
    assert found["stop"] > 4000 and found["length"] < 100, found


TEXTS: list[tuple[StructuredOutputsParams, str]] = [
    (StructuredOutputsParams(regex=r"[a-f]{3}-[0-9]{2,4}(x|yz)"), r"[a-f]{3}-[0-9]{2,4}(x|yz)"),
    (StructuredOutputsParams(regex="^ünï/code{2}$"), "ünï/codee"),
    (
        StructuredOutputsParams(choice=["yes", "no", "ye", "<|im_end|>", "a\nb", '"q" \\']),
        '(yes|no|ye|<.im_end.>|a\nb|"q" .)',
    ),
    (StructuredOutputsParams(grammar='start: "(" start ")" | "x"'), r"\(*x\)*"),
    (StructuredOutputsParams(grammar='root ::= "a" b{2,3}\nb ::= [0-9] | "-"'), "a[0-9-]{2,3}"),
    (StructuredOutputsParams(json={"const": {"a": [1, None]}}, disable_any_whitespace=True), r'\{"a":\[1,null\]\}'),
    (StructuredOutputsParams(json={"enum": [[1, 2]]}, whitespace_pattern="_"), r"\[_?1_?,_?2_?\]"),
]


@pytest.mark.parametrize(("structured", "pattern"), TEXTS)
@pytest.mark.parametrize("logprobs", [None, 0])
def test_texts_match(llm: LLM, structured: StructuredOutputsParams, pattern: str, logprobs: int | None) -> None:
    params = [
        SamplingParams(seed=i, max_tokens=200, logprobs=logprobs, structured_outputs=structured) for i in range(20)
    ]
    for result in llm.generate(["x"] * 20, params):
        output = result.outputs[0]
        assert output.finish_reason == "stop" and re.fullmatch(pattern, output.text, re.S), output.text
        if logprobs is not None:
            assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)


def test_text_with_tags_is_free_but_for_the_tags(llm: LLM) -> None:
    tag = {"structures": [{"begin": "e=", "schema": {"const": 12}, "end": "!"}], "triggers": ["e"]}
    params = [
        SamplingParams(seed=i, max_tokens=400, structured_outputs=StructuredOutputsParams(structural_tag=tag))
        for i in range(20)
    ]
    texts = [result.outputs[0].text for result in llm.generate(["x"] * 20, params)]
    assert sum("e" in text for text in texts) > 5
    for text in texts:
        for rest in text.split("e")[1:-1]:
            assert rest.startswith("=12!"), text


BOOLEANS = {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}
GUIDES = (
    Guide(Grammar("regex", "[a-z]{3,30}(-a forced text-)[0-9]{2}")),
    Guide(Grammar("json_schema", json.dumps(prepare(BOOLEANS, {})))),
    Guide(Grammar("regex", "[0-9]{4}"), Reasoning("", "+,", (), (), byte_ids("+,")), 6),
    Guide(Grammar("lark", 'start: "(" start? ")"'), Reasoning("I", "JK", (), byte_ids("I"), byte_ids("JK")), 9),
)


def streams() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(1)
    prompts = [rng.choices(range(250), k=rng.randrange(4, 90)) for _ in range(16)]
    params = [
        SamplingParams(
            temperature=i % 2, seed=i, max_tokens=40, logprobs=0 if i % 5 == 0 else None, guide=GUIDES[i % len(GUIDES)]
        )
        for i in range(len(prompts))
    ]
    return prompts, params


@pytest.mark.soak  # tests/sched/test_guided.py has the same in virtual time
def test_guided_answers_depend_on_no_schedule(model: Path) -> None:
    """Alone, together, in chunks, preempted and over killed workers: the same tokens."""
    prompts, params = streams()

    def run(**options: Any) -> list[list[int]]:
        changes = options.pop("changes", None)
        config = engine_config(model, changes, **options)
        return run_engine(config, lambda engine: answers(engine, prompts, params, eos_token_ids=(END,)))

    together = run()
    assert sum(END in answer for answer in together) > 8
    assert run(max_num_seqs=1) == together
    assert run(max_num_batched_tokens=32, prefix_caching=False) == together

    async def preempted(engine: AsyncEngine) -> list[list[int]]:
        found = await answers(engine, prompts, params, eos_token_ids=(END,))
        assert engine.stats.num_preemptions > 0
        return found

    (blocks,) = engine_config(model).longest_blocks
    assert run_engine(engine_config(model, {"num_blocks": (blocks + 2,)}), preempted) == together

    async def killed(engine: AsyncEngine) -> list[list[int]]:
        killer = Killer(engine, 3, seed=2)
        found = await answers(engine, prompts, params, killer, eos_token_ids=(END,))
        assert engine.stats.num_respawns == killer.killed > 0
        return found

    assert run_engine(engine_config(model, {"faults": QUICK_FAULTS}), killed) == together

    async def unguided(engine: AsyncEngine) -> list[list[int]]:
        killer = GuideKiller(engine, [20, 21, 100, 200])
        found = await answers(engine, prompts, params, killer, eos_token_ids=(END,))
        assert killer.num_killed > 2 and engine.stats.num_respawns == 0
        return found

    assert run_engine(engine_config(model), unguided) == together


class GuideKiller:
    """Kills the process that follows grammars after so many outputs; an `on_output` for `answers`."""

    def __init__(self, engine: AsyncEngine, after: Sequence[int]) -> None:
        self._engine, self._after, self._num_outputs = engine, after, 0
        self.num_killed = 0

    def __call__(self, output: RequestOutput) -> None:
        self._num_outputs += 1
        if self._num_outputs in self._after:
            assert self._engine.ready is not None
            for process in psutil.Process(self._engine.ready.worker_pid).children():
                process.kill()
                self.num_killed += 1


def test_an_ambiguous_grammar_holds_up_nobody(model: Path) -> None:
    """Others, with a grammar and without, are answered while the worker finds out that it takes too long."""
    hostile = SamplingParams(max_tokens=20, temperature=0, guide=Guide(ambiguous_grammar(200)))
    good = SamplingParams(max_tokens=12, seed=1, guide=Guide(Grammar("regex", "[a-c]{12}")))

    async def scenario(engine: AsyncEngine) -> None:
        await answers(engine, [[1, 2]], good, eos_token_ids=(END,))  # starts the process
        (request,) = requests_of([[5, 6, 7]], [hostile], (END,))
        faults: list[RequestFault] = []

        def take(outputs: list[RequestOutput]) -> None:
            faults.extend(output.fault for output in outputs if output.fault is not None)

        refused = asyncio.ensure_future(
            engine.submit([msgspec.structs.replace(request, request_id="h")]).deliver_to(take)
        )
        plain = 0
        while not refused.done():
            await answers(engine, [[plain, 2]])
            plain += not refused.done()
        await refused
        assert [(fault.status, fault.code) for fault in faults] == [(400, "invalid_grammar")]
        assert "takes too long" in faults[0].message and plain > 3
        assert engine.stats.num_respawns == 0
        await answers(engine, [[1, 2]], good, eos_token_ids=(END,))

    run_engine(engine_config(model), scenario)


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    size: Literal["small", "large"]
    founded: int = pydantic.Field(ge=0, le=2030)


GUIDING = "pypto_serving.worker.guiding"


def has_llguidance(process: psutil.Process) -> bool:
    return any("llguidance" in each.path for each in process.memory_maps())


def test_a_server_answers_with_models(model: Path) -> None:
    """Whole and streamed; llguidance is loaded when the first request needs it, and never by API process or worker."""
    with Server(model, "--max-model-len", "512", "--kv-memory", "64MiB") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        assert not any(map(has_llguidance, server.family()))
        messages: Any = [{"role": "user", "content": "Name a city."}]
        asked: dict[str, Any] = {"model": server.ready["model"][0], "messages": messages, "seed": 1, "max_tokens": 300}
        parsed = client.chat.completions.parse(**asked, response_format=City).choices[0]
        assert parsed.finish_reason == "stop" and isinstance(parsed.message.parsed, City)
        with client.chat.completions.stream(**asked, response_format=City) as stream:
            streamed = stream.get_final_completion().choices[0].message
        assert (streamed.content, streamed.parsed) == (parsed.message.content, parsed.message.parsed)
        with pytest.raises(openai.BadRequestError, match=r"guided_grammar: .*unheard_of") as refused:
            client.chat.completions.create(**asked, extra_body={"guided_grammar": "start: <unheard_of>"})
        assert (refused.value.param, refused.value.code) == ("guided_grammar", "invalid_grammar")
        loaded = [process for process in server.family() if has_llguidance(process)]
        assert server.worker() not in loaded and server.family()[0] not in loaded
        assert [process for process in loaded if GUIDING in process.cmdline()]
