"""The offline API, as a program uses it."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from pypto_serving import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from pypto_serving.api.prompting.prompts import ENCODER_OF_ARCHITECTURE
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.cli import main
from pypto_serving.errors import ConfigError, ContextLengthError, EngineDeadError, RequestError, RequestFailedError
from pypto_serving.parallel.topology import place_ranks
from pypto_serving.processes import Copy
from pypto_serving.setup.host import read_host_facts
from tests.api.checkpoint import write_deepseek_v4
from tests.checkpoints import make_checkpoint
from tests.e2e.ranks import follows
from tests.needs import needs_kernels
from tests.schemas import ambiguous_grammar

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=1024, log_level="warning") as model:
        yield model


def test_texts_and_token_ids_in_order(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    by_text = llm.generate(["Hello", "1 + 1 ="], params)
    assert [result.prompt for result in by_text] == ["Hello", "1 + 1 ="]
    by_ids = llm.generate([result.prompt_token_ids for result in by_text], params, progress=False)
    assert [r.outputs[0].token_ids for r in by_ids] == [r.outputs[0].token_ids for r in by_text]
    assert all(len(r.outputs[0].token_ids) == 8 and r.outputs[0].finish_reason == "length" for r in by_ids)
    single = llm.generate(by_ids[0].prompt_token_ids, params, progress=False)
    assert single[0].outputs == by_ids[0].outputs


@needs_kernels
def test_ranks_answer_as_one(llm: LLM) -> None:
    """Each on the CPUs that it is given."""
    params = SamplingParams(temperature=1, seed=3, max_tokens=8, ignore_eos=True, logprobs=2)
    prompts, nodes = ["Hello", "What is 12+30?"], read_host_facts().nodes
    with LLM(max_model_len=1024, tp=2, num_threads=2) as ranks:
        answers = ranks.generate(prompts, params)
        following = [child for child in psutil.Process().children(recursive=True) if follows(child)]
        cpus = sorted(child.cpu_affinity() for child in following)
    assert cpus == sorted([*place.cpus] for place in place_ranks(nodes, 2, 2)[1:])
    assert [result.outputs for result in answers] == [result.outputs for result in llm.generate(prompts, params)]


def test_many_more_prompts_than_rows(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    results = llm.generate([[i % 200] for i in range(600)], params, progress=False)
    assert [result.prompt_token_ids for result in results] == [[i % 200] for i in range(600)]
    assert results[0].outputs == results[200].outputs == results[400].outputs


def test_prompt_logprobs_and_no_tokens(llm: LLM) -> None:
    """Under vLLM's names. The values of a prompt are those that a choice would have at its positions."""
    params = SamplingParams(temperature=0, max_tokens=0, n=2, prompt_logprobs=2)
    (result,) = llm.generate("What is 12+30?", params)
    assert [(output.token_ids, output.text, output.finish_reason) for output in result.outputs] == [
        ([], "", "length")
    ] * 2
    assert result.prompt_logprobs is not None and len(result.prompt_logprobs) == len(result.prompt_token_ids)
    first, *scored = result.prompt_logprobs
    assert first is None
    once = SamplingParams(temperature=0, max_tokens=1, logprobs=2)
    prompts = [result.prompt_token_ids[:end] for end in range(1, len(result.prompt_token_ids))]
    for entry, token_id, one in zip(scored, result.prompt_token_ids[1:], llm.generate(prompts, once), strict=True):
        assert entry is not None and token_id in entry and one.outputs[0].logprobs is not None
        assert one.outputs[0].logprobs[0].items() <= entry.items()
    assert llm.generate("Hello", SamplingParams(max_tokens=1))[0].prompt_logprobs is None


def test_stops_that_are_shown_and_prompts_that_are_cut(llm: LLM) -> None:
    common: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
    chat = [{"role": "user", "content": "What is 12+30?"}]
    (plain,) = llm.chat(chat, SamplingParams(**common))[0].outputs
    assert plain.text == "12 + 30 = 42" and plain.stop_reason is None
    for shown, text in ((False, "12 + 30"), (True, "12 + 30 =")):
        params = SamplingParams(**common, stop=" =", include_stop_str_in_output=shown)
        (cut,) = llm.chat(chat, params)[0].outputs
        assert (cut.text, cut.stop_reason, cut.finish_reason) == (text, " =", "stop")
    (result,) = llm.generate("Hello you there", SamplingParams(max_tokens=1, truncate_prompt_tokens=2))
    assert len(result.prompt_token_ids) == 2


def test_choices_seeds_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=2, n=3, seed=4, max_tokens=12, ignore_eos=True, logprobs=2)
    first, second = (llm.generate("Once", params, progress=False)[0] for _ in range(2))
    assert first.outputs == second.outputs
    assert len({tuple(output.token_ids) for output in first.outputs}) == 3
    for output in first.outputs:
        assert output.logprobs is not None and len(output.logprobs) == 12
        for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
            assert entry[token_id].logprob <= max(value.logprob for value in entry.values()) <= 0
            assert 2 <= len(entry) <= 3


def test_stop_strings_cut_the_text(llm: LLM) -> None:
    free = llm.chat([{"role": "user", "content": "Count from 1 to 9."}], progress=False)[0].outputs[0]
    assert "5" in free.text
    params = SamplingParams(temperature=0, max_tokens=100, stop=("5",))
    cut = llm.chat([{"role": "user", "content": "Count from 1 to 9."}], params, progress=False)[0].outputs[0]
    assert cut.text == free.text[: free.text.index("5")]
    assert cut.finish_reason == "stop"


def test_templates_tools_and_continued_answers(llm: LLM) -> None:
    template = "{% for t in tools or [] %}{{ t.function.name }}: {% endfor %}"
    template += "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    messages = [{"role": "user", "content": "When?"}, {"role": "assistant", "content": "It is "}]
    tools = [{"type": "function", "function": {"name": "now"}}]
    params = SamplingParams(temperature=0, max_tokens=2)
    (result,) = llm.chat(messages, params, tools=tools, chat_template=template, continue_final_message=True)
    assert result.prompt == "now: [When?][It is "
    assert result.outputs[0].tool_calls == []
    (plain,) = llm.chat(messages, params, chat_template=template)
    assert plain.prompt == "[When?][It is ]"
    (described,) = llm.chat(messages[:1], params, tools=tools, chat_template="{{ messages[0].content }}")
    assert described.prompt is not None and '{"type": "function", "function": {"name": "now"}}' in described.prompt
    with pytest.raises(RequestError, match="tools is 5, but must be a list"):
        llm.chat(messages, params, tools=5, chat_template=template)  # type: ignore[arg-type]


def test_streamed_chat_equals_the_whole_answer(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is 37+45?"}]
    whole = llm.chat(messages, progress=False)[0].outputs[0].text
    assert "".join(part.text for part in llm.stream_chat(messages)) == whole
    stream = llm.stream_chat(messages)
    next(stream)
    stream.close()
    assert llm.chat(messages, progress=False)[0].outputs[0].text == whole


def test_reasoning_stands_beside_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSeek V4's chats on a model that is quick to make."""
    folder = write_deepseek_v4(make_checkpoint(tmp_path, dtype="bfloat16", vocab_size=448))
    monkeypatch.setitem(ENCODER_OF_ARCHITECTURE, "Qwen3ForCausalLM", "deepseek_v4")
    messages, params = [{"role": "user", "content": "hello"}], SamplingParams(temperature=0, max_tokens=24)
    with LLM(str(folder), log_level="warning") as llm:
        thinks = llm.chat(messages, params, progress=False)[0]
        says = llm.chat(messages, params, chat_template_kwargs={"thinking": False}, progress=False)[0]
        pieces = list(llm.stream_chat(messages, params))
    assert thinks.prompt == "<｜begin▁of▁sentence｜><｜User｜>hello<｜Assistant｜><think>"
    assert (says.outputs[0].reasoning, list(says.outputs[0].tool_calls)) == ("", [])
    assert says.outputs[0].text
    tokenizer = Tokenizer.load(folder)
    whole = tokenizer.decode(thinks.outputs[0].token_ids, skip_special_tokens=False)
    reasoning, _, answer = whole.partition("</think>")
    assert (thinks.outputs[0].reasoning, thinks.outputs[0].text) == (reasoning, answer)
    parts = {kind: "".join(piece.text for piece in pieces if piece.kind == kind) for kind in ("reasoning", "content")}
    assert parts == {"reasoning": reasoning, "content": answer}
    asked = ["generate", "--model", str(folder), "--chat", "hello", "--max-tokens", "24", "--temperature", "0"]
    assert main(asked) == 0
    shown = capsys.readouterr()
    assert shown.out == answer + "\n" and reasoning in shown.err
    assert main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reasoning"] == reasoning


def test_prompts_that_cannot_work_are_named(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="1024"):
        llm.generate([[5] * 2000], progress=False)
    with pytest.raises(RequestError, match="empty"):
        llm.generate([[]], progress=False)
    for wrong in ({"logit_bias": {99999: 1.0}}, {"allowed_token_ids": [3, 99999]}, {"stop_token_ids": [99999]}):
        with pytest.raises(RequestError, match=rf"{next(iter(wrong))}.* 99999") as caught:
            llm.generate("Hello", SamplingParams(**wrong), progress=False)
        assert not isinstance(caught.value, RequestFailedError) and caught.value.param in wrong
    with pytest.raises(RequestError, match="2 sampling_params for 1 prompts"):
        llm.generate("Hello", [SamplingParams(), SamplingParams()], progress=False)
    assert llm.generate("Hello", progress=False)[0].outputs[0].token_ids


def test_prompts_of_numpy_and_of_vllm(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    forms: list[Any] = [
        np.array([5, 6]),
        [np.int64(5), 6],
        [[5, np.int32(6)]],
        np.array([[5, 6]]),
        (5, 6),
        {"prompt_token_ids": [5, 6]},
        [{"prompt_token_ids": np.array([5, 6]), "prompt": "the text of both"}],
    ]
    (expected,) = llm.generate([5, 6], params, progress=False)
    for form in forms:
        (made,) = llm.generate(form, params, progress=False)
        assert (made.prompt, made.prompt_token_ids) == (None, [5, 6]) and made.outputs == expected.outputs
    texts = llm.generate([{"prompt": "Hello"}, "Hello"], params, progress=False)
    assert texts[0].prompt == "Hello" and texts[0].outputs == texts[1].outputs
    assert llm.generate({"prompt": "Hello"}, params, progress=False)[0].outputs == texts[0].outputs
    assert llm.generate([], params, progress=False) == []


A_PROMPT = "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ({"a": 1}, f"prompts is {{'a': 1}}, but must be {A_PROMPT}"),
        ({"prompt": 5}, f"prompts is {{'prompt': 5}}, but must be {A_PROMPT}"),
        (b"ab", f"prompts is b'ab', but must be a prompt or a list of prompts; a prompt is {A_PROMPT}"),
        (17, "prompts is 17, but must be a prompt or a list"),
        (None, "prompts is None, but must be a prompt or a list"),
        ([None], f"prompts[0] is None, but must be {A_PROMPT}"),
        (["a", b"ab"], "prompts[1] is b'ab', but must be a text"),
        ([1.9, 2.9], "prompts[0] is 1.9, but must be a text"),
        (np.array([1.9]), "but must be a text, a list of token ids"),
        ([True], "prompts[0] is True, but must be a text"),
        ([1, "a"], "prompts[1] is 'a', but must be a token id"),
        ([[1.5]], "prompts[0][0] is 1.5, but must be a token id, a whole number; a prompt is a text"),
        ([[True]], "prompts[0][0] is True, but must be a token id"),
        ([["a"]], "prompts[0][0] is 'a', but must be a token id"),
        ([{"prompt": "a", "multi_modal_data": {}}], "prompts[0] is {'prompt': 'a', 'multi_modal_data': {}}, but must"),
        ([{"prompt_token_ids": 5}], "prompts[0]['prompt_token_ids'] is 5, but must be a list of token ids"),
        ([{"prompt_token_ids": []}], "prompts[0]['prompt_token_ids'] is an empty list"),
    ],
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        llm.generate(prompts, progress=False)
    assert caught.value.param == "prompts"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 1}, "sampling_params is {'n': 1}, but must be a SamplingParams or a list of them"),
        (5, "sampling_params is 5, but must be"),
        ([None], "sampling_params[0] is None, but must be a SamplingParams"),
    ],
)
def test_what_is_no_sampling_params_is_refused(llm: LLM, params: Any, message: str) -> None:
    for call in (llm.generate, llm.chat):
        given: Any = "a" if call == llm.generate else [{"role": "user", "content": "a"}]
        with pytest.raises(RequestError, match=re.escape(message)) as caught:
            call(given, params, progress=False)
        assert caught.value.param == "sampling_params"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages is 'hi', but must be a list of messages such as {'role': 'user', 'content': 'Hello'}"),
        ({"role": "user", "content": "hi"}, "messages is {'role': 'user', 'content': 'hi'}, but must be a list"),
        (None, "messages is None, but must be a list of messages"),
        ([], "messages is an empty list; send at least one message"),
        ([[]], "messages[0] is an empty list; send at least one message"),
        (["hi"], "messages[0] is 'hi', but must be a list of messages"),
        ([{"role": "user", "content": "hi"}, "hi"], "messages[1] is 'hi', but must be a message with role and content"),
        ([{"role": "user"}], "messages[0].content is missing; send a string"),
        ([{"content": "hi"}], "messages[0].role is missing; send a string"),
        ([{"role": "user", "content": 5}], "messages[0].content is 5, but must be a string or a list of"),
        ([[{"role": 5, "content": "hi"}]], "messages[0][0].role is 5, but must be a string"),
    ],
)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        llm.chat(messages, progress=False)
    assert str(caught.value.param).startswith("messages")
    with pytest.raises(RequestError, match="messages"):
        next(llm.stream_chat(messages))


def test_template_arguments_are_a_mapping(llm: LLM) -> None:
    wrong: Any = "x"
    with pytest.raises(RequestError, match="chat_template_kwargs is 'x', but must be a mapping"):
        llm.chat([{"role": "user", "content": "a"}], chat_template_kwargs=wrong, progress=False)


def test_shutdown_from_two_threads_ends_all_processes_and_returns_in_both_at_the_end() -> None:
    before = set(psutil.Process().children(recursive=True))
    llm = LLM(max_model_len=64, log_level="warning")
    children = set(psutil.Process().children(recursive=True)) - before
    assert len(children) == 2
    left: list[int] = []

    def end() -> None:
        llm.shutdown()
        left.append(sum(child.is_running() for child in children))

    threads = [threading.Thread(target=end, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert left == [0, 0]
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate("Hello", progress=False)


def guided(grammar: str) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(grammar=grammar))


SLOW = ambiguous_grammar(140).text
WAITING: dict[str, Callable[[LLM], object]] = {
    "long texts": lambda llm: llm.generate(["zq " * 300_000] * 40),
    "many texts": lambda llm: llm.generate(["zq " * 300] * 40_000),
    "grammars": lambda llm: llm.generate(["a"] * 100, [guided(f"{SLOW}\n// {i}") for i in range(100)]),
    "answers": lambda llm: llm.generate(["Hello"] * 2000, SamplingParams(max_tokens=2000, ignore_eos=True)),
    "a stream": lambda llm: list(llm.stream("Hello", SamplingParams(max_tokens=4000, ignore_eos=True))),
    "a stream of a long text": lambda llm: list(llm.stream("zq " * 340_000)),
}


def test_shutdown_ends_calls_that_wait(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(log_level="warning")
    ended: dict[str, BaseException] = {}

    def wait(call: str) -> None:
        try:
            WAITING[call](llm)
        except BaseException as error:
            ended[call] = error

    threads = [threading.Thread(target=wait, args=(call,), daemon=True) for call in WAITING]
    for thread in threads:
        thread.start()
    threads[0].join(1)  # in which they begin
    assert not ended
    llm.shutdown()
    for thread in threads:
        thread.join(20)
    assert ended.keys() == WAITING.keys()
    assert all(isinstance(error, EngineDeadError) and "was shut down" in str(error) for error in ended.values())
    assert not caplog.records


def test_a_copy_of_the_process_cannot_use_a_model_and_leaves_it_alone(llm: LLM) -> None:
    """Not even `with` or an unfinished stream keep it from ending."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    before, stream = llm.generate("Hello", params)[0].outputs, llm.stream("Hello", params)
    next(stream)

    def copied() -> int:
        with llm:
            for call in (
                lambda: llm.generate("Hello"),
                lambda: next(llm.stream_chat([{"role": "user", "content": ""}])),
            ):
                with pytest.raises(EngineDeadError, match=f"works in process {os.getppid()} only.* by spawn"):
                    call()
        stream.close()
        llm.shutdown()
        sys.exit(7)

    started_s, copy = time.monotonic(), Copy(copied)
    with pytest.raises(TypeError, match="cannot be copied"):
        pickle.dumps(llm)
    assert copy.wait(30) == 1  # what SystemExit is to a Copy, which ends without the interpreter's farewell
    assert time.monotonic() - started_s < 10
    assert "".join(part.text for part in stream) and llm.generate("Hello", params)[0].outputs == before


def test_multiprocessing_by_fork_beside_a_model() -> None:
    program = """
import multiprocessing, sys, time
from pypto_serving import LLM, AsyncLLM, SamplingParams

def work(llm, queue):
    try:
        llm.generate("Hello")
    except Exception as error:
        queue.put(type(error).__name__)
    with LLM(max_model_len=64, log_level="error") as own:
        queue.put(len(own.generate("Hello", SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids))
    sys.exit(3)

fork = multiprocessing.get_context("fork")
with LLM(max_model_len=64, log_level="error") as llm:
    llm.generate("Hello")
    queue = fork.Queue()
    child = fork.Process(target=work, args=(llm, queue))
    child.start()
    print(queue.get(), queue.get())
    child.join(20)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    print(child.exitcode, len(llm.generate("Hello", params)[0].outputs[0].token_ids))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("EngineDeadError 3\n3 4\n", 0), done.stderr


def test_bad_options_leave_nothing_behind() -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(ConfigError, match=r"max_model_length.*did you mean max_model_len"):
        LLM(max_model_length=10)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_the_asynchronous_api_answers_as_the_other_one(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    endless = SamplingParams(max_tokens=1000, ignore_eos=True)
    greeting = [{"role": "user", "content": "hello"}]

    async def waits_for_no_request(answers: AsyncLLM) -> None:
        while answers._service.admission.in_flight:
            await asyncio.sleep(0.01)

    async def use() -> None:
        async with AsyncLLM(max_model_len=1024, log_level="warning") as answers:
            texts = ["Hello", "1 + 1 =", "Seven"]
            found = await asyncio.gather(*(answers.generate(text, params) for text in texts))
            assert [each.outputs for (each,) in found] == [each.outputs for each in llm.generate(texts, params)]
            assert (await answers.chat(greeting, params))[0].outputs == llm.chat(greeting, params)[0].outputs
            assert [part async for part in answers.stream("Hello", params)] == list(llm.stream("Hello", params))
            task = asyncio.create_task(answers.generate("Hello", endless))
            await asyncio.sleep(0)
            async for part in answers.stream_chat(greeting, endless):
                assert part.kind == "content"
                break
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(waits_for_no_request(answers), 20)
            with pytest.raises(RequestError, match="n is 2"):
                await anext(answers.stream("Hello", SamplingParams(n=2)))
            left = asyncio.create_task(answers.generate("Hello", endless))
            while not answers._service.admission.in_flight:
                await asyncio.sleep(0.01)
        with pytest.raises(RequestFailedError, match="shutting down"):
            await left

    asyncio.run(use())
