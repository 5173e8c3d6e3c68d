"""Generate without a server: the offline API, `LLM`."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence, Sized
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, Unpack

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pypto_serving.api.chat.formats import OutputFormat
from pypto_serving.api.chat.parsers.scanner import TextPart
from pypto_serving.api.chat.tools import read_tool_use
from pypto_serving.api.generation.choice import Delta, TokenUsage
from pypto_serving.api.generation.generation import Generation
from pypto_serving.api.generation.request import (
    FittedPrompt,
    GenerationRequest,
    MaxTokens,
    fit_params,
    fit_prompt,
    new_prompt_logprobs,
)
from pypto_serving.api.grammars.structured import checked, with_chat_guide
from pypto_serving.api.service import Service
from pypto_serving.api.settings import serving_config
from pypto_serving.engine.replicas import make_engine
from pypto_serving.errors import RequestError
from pypto_serving.offline.inputs import (
    Messages,
    Prompt,
    read_chat_fields,
    read_conversation,
    read_conversations,
    read_params,
    read_prompts,
)
from pypto_serving.offline.loop_thread import LoopThread, Put
from pypto_serving.offline.outputs import (
    CompletionOutput,
    GenerationOutput,
    Logprob,
    completion_output,
    prompt_logprobs,
)
from pypto_serving.processes import open_standard_files
from pypto_serving.setup.option_table import QUIET_DEFAULTS
from pypto_serving.setup.options import Options, make_options
from pypto_serving.setup.prepare import model_spec, prepare
from pypto_serving.threads import in_slow_thread
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.model import ModelSpec
from pypto_serving.types.sampling import SamplingParams

if TYPE_CHECKING:
    from pypto_serving.offline.llm_options import LLMOptions

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "GenerationOutput", "Logprob", "Messages", "Prompt"]

T = TypeVar("T")
LONG_TEXT_CHARS = 16_384
ENCODED_AT_ONCE = 16
"""Prompts that are encoded before the event loop does other work."""


@dataclass(frozen=True, slots=True)
class _Job:
    """An encoded prompt. `text` is None if token ids were given."""

    text: str | None
    prompt: FittedPrompt
    params: SamplingParams
    new_parser: OutputFormat | None


class _OfflineEngine:
    """Owns an engine and what encodes prompts for it. Its coroutines run in the event loop that starts the engine."""

    def _load(self, options: Options, model: ModelSpec) -> None:
        """Decide the configuration, and prepare the engine. Raises ConfigError or ModelError."""
        resolved = prepare(options, model, QUIET_DEFAULTS, serves=False)
        serving = serving_config(resolved.server, model)
        open_standard_files()
        self._ids = itertools.count()
        self._engine = make_engine(resolved.engines)
        self._service = Service(self._engine, serving)

    async def _start(self) -> None:
        await self._engine.start()
        await self._engine.wait_ready()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM cannot be copied or sent to another process; make one there")

    @property
    def config(self) -> EngineConfig:
        """The configuration of the engine; of the first one where there are several."""
        return self._engine.config

    def get_default_sampling_params(self) -> SamplingParams:
        """Return SamplingParams with the model's own defaults, from its generation_config.json."""
        return SamplingParams(**self._service.serving.default_sampling.given())

    def _params_of(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int, **defaults: Any
    ) -> list[SamplingParams]:
        if given is None:
            given = msgspec.structs.replace(self.get_default_sampling_params(), **defaults)
        return read_params(given, count)

    async def _encode(self, prompt: str | list[int], params: SamplingParams) -> _Job:
        prompter = self._service.prompter
        if isinstance(prompt, str):
            ids = await _encoded(prompt, partial(prompter.encode_text, prompt, "prompt", True))
            return await self._job(prompt, ids, params)
        return await self._job(None, prompter.check_token_ids(prompt, "prompt"), params)

    async def _encode_chat(
        self, messages: Messages, params: SamplingParams, kwargs: Mapping[str, Any] | None = None
    ) -> _Job:
        prompter = self._service.prompter
        fields = kwargs or {}
        chat = prompter.render(messages, fields)
        ids = await _encoded(chat.prompt, partial(prompter.encode_chat, chat, "messages", False))
        guided = with_chat_guide(params, prompter, chat.new_parser, read_tool_use(fields.get("tools"), None, None))
        return await self._job(chat.prompt if isinstance(chat.prompt, str) else None, ids, guided, chat.new_parser)

    async def _job(
        self, text: str | None, ids: list[int], params: SamplingParams, new_parser: OutputFormat | None = None
    ) -> _Job:
        config = self._engine.config
        prompt = fit_prompt(ids, MaxTokens(params.max_tokens), config, truncate_to=params.truncate_prompt_tokens)
        fitted = fit_params(params, self._service.prompter, new_parser)
        if fitted.guide is not None:
            fitted = await in_slow_thread(checked, fitted)
        return _Job(text, prompt, fitted, new_parser)

    async def _run(
        self,
        encode: Callable[[T, SamplingParams], Coroutine[Any, Any, _Job]],
        prompts: Sequence[T],
        params: Sequence[SamplingParams],
        progress: bool,
    ) -> list[GenerationOutput]:
        """Generate for all prompts, up to the engine's limit at once."""
        jobs = await _all_or_none(encode, [*zip(prompts, params, strict=True)], ENCODED_AT_ONCE)
        widest = max((job.params.n for job in jobs), default=1)
        with _progress_bar(len(jobs), progress) as bar:

            async def one(job: _Job) -> GenerationOutput:
                output = await self._complete(job)
                bar.advance(bar.task_ids[0])
                return output

            return await _all_or_none(
                one, [(job,) for job in jobs], max(1, self._engine.config.max_unfinished // widest)
            )

    async def _complete(self, job: _Job) -> GenerationOutput:
        with closing(self._submit(job, keep_token_ids=True)) as generation:
            outputs = await generation.collect()
        choices = generation.choices
        made = [completion_output(output, job.new_parser) for output in outputs]
        ids, width, scored = list(job.prompt.token_ids), job.params.prompt_logprobs, None
        if width is not None:
            scored = prompt_logprobs(generation.prompt_logprobs[0].entries(width, self._service.tokenizer))
        return GenerationOutput(choices[0].request_id, job.text, ids, made, choices[0].num_cached, scored)

    async def _stream(self, job: _Job, put: Put[TextPart]) -> TokenUsage:
        """Put the text parts of the only choice; return what it took. Raises RequestError unless n is 1."""
        if job.params.n != 1:
            raise RequestError(f"n is {job.params.n}, but a stream is one answer; set n to 1", param="n")
        parser = None if job.new_parser is None else job.new_parser()

        def take(deltas: list[Delta]) -> None:
            for delta in deltas:
                if parser is not None:
                    parts = parser.push(delta.text, delta.finish_reason is not None)
                else:
                    parts = [TextPart("content", delta.text)] if delta.text else []
                for part in parts:
                    if isinstance(part, TextPart):
                        put(part)

        with closing(self._submit(job, keep_token_ids=False)) as generation:
            await generation.run(take)
            return generation.usage()

    def _submit(self, job: _Job, keep_token_ids: bool) -> Generation:
        name = f"offline-{next(self._ids)}"
        prompts = [job.prompt]
        collected = new_prompt_logprobs(prompts, job.params)
        request = GenerationRequest(name, prompts, job.params, keep_token_ids=keep_token_ids, prompt_logprobs=collected)
        return Generation(self._service, request)


class LLM(_OfflineEngine):
    """Generate with a model in its own engine and worker processes; also a context manager.

    `model` is a folder or a hub name, None for the bundled one. `options` have the names of the command line, such as
    `max_model_len` or `kv_memory`. Raises ConfigError or ModelError if they cannot work, EngineDeadError if the worker
    cannot be started.
    """

    def __init__(self, model: str | None = None, **options: Unpack[LLMOptions]) -> None:
        chosen = make_options({"model": model, **options}, as_arguments=True)
        self._open(chosen, model_spec(chosen))

    @classmethod
    def from_options(cls, options: Options, model: ModelSpec) -> Self:
        """Open `model` as checked `options` ask for."""
        llm = cls.__new__(cls)
        llm._open(options, model)
        return llm

    def _open(self, options: Options, model: ModelSpec) -> None:
        """Start engine and worker, and wait until they are ready."""
        self._load(options, model)
        self._ending = threading.Lock()
        self._loop = LoopThread("pypto-llm")
        try:
            self._loop.call(self._start)
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """End the engine and its worker. May be called again and from any thread; returns when both have ended.

        Calls that wait raise EngineDeadError. In a copy of the process (fork) it does nothing.
        """
        if not self._loop.is_copied:  # the engine is the original's
            with self._ending:
                self._loop.stop(self._engine.stop)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.shutdown()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[GenerationOutput]:
        """Continue each prompt; return results in the order of the prompts.

        A prompt is a text, a list or array of token ids, or vLLM's `{"prompt": text}` or `{"prompt_token_ids": ids}`.
        Give one SamplingParams for all prompts or one for each; None means the model's defaults with 16 tokens. Raises
        RequestError if an argument is of a wrong type or a prompt does not fit, RequestFailedError if the engine gives
        one up.
        """
        entries = read_prompts(prompts)
        params = self._params_of(sampling_params, len(entries))
        return self._loop.call(lambda: self._run(self._encode, entries, params, progress))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = False,
    ) -> list[GenerationOutput]:
        """Answer each conversation; return results in order. The arguments are named as the fields of the HTTP API.

        None as parameters means the model's defaults, with no limit of tokens but the context. Raises like `generate`.
        """
        fields = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message or None,
            "tools": tools,
        }
        conversations = read_conversations(messages)
        params = self._params_of(sampling_params, len(conversations), max_tokens=None)
        encode = partial(self._encode_chat, kwargs=read_chat_fields(fields, chat_template_kwargs))
        return self._loop.call(lambda: self._run(encode, conversations, params, progress))

    def stream_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None
    ) -> Generator[TextPart, None, TokenUsage]:
        """Answer one conversation piece by piece; closing the generator ends the request. Its value is the usage.

        Pieces are reasoning or content; tool calls are left out. Raises like `chat`, and RequestError unless n is 1.
        """
        conversation = read_conversation(messages)
        (params,) = self._params_of(sampling_params, 1, max_tokens=None)
        return (yield from self._iterate(params, lambda: self._encode_chat(conversation, params)))

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[TextPart, None, TokenUsage]:
        """Continue one prompt piece by piece; closing the generator ends the request. Its value is the usage.

        Raises like `generate`, and RequestError unless n is 1.
        """
        (entry,) = read_prompts(prompt)
        (params,) = self._params_of(sampling_params, 1)
        return (yield from self._iterate(params, lambda: self._encode(entry, params)))

    def _iterate(
        self, params: SamplingParams, encode: Callable[[], Coroutine[Any, Any, _Job]]
    ) -> Generator[TextPart, None, TokenUsage]:
        """Yield the pieces of the only choice, and return its usage."""
        usage: list[TokenUsage] = []

        async def stream(put: Put[TextPart]) -> None:
            usage.append(await self._stream(await encode(), put))

        yield from self._loop.iterate(stream)
        return usage[0]


class AsyncLLM(_OfflineEngine):
    """Generate as `LLM` does, in the caller's event loop: `async with AsyncLLM(model, **options) as llm`.

    Calls may run at the same time. A call that is cancelled, or a stream that is closed, ends its requests.
    """

    def __init__(self, model: str | None = None, **options: Unpack[LLMOptions]) -> None:
        self._options = make_options({"model": model, **options}, as_arguments=True)

    async def __aenter__(self) -> Self:
        """Start engine and worker, and wait until they are ready. Raises as `LLM` does."""
        model = await in_slow_thread(model_spec, self._options)
        await in_slow_thread(self._load, self._options, model)
        try:
            await self._start()
        except BaseException:
            await self._engine.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """End the engine. Calls that wait raise RequestFailedError."""
        await self._engine.stop()

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[GenerationOutput]:
        """Continue each prompt; see `LLM.generate`."""
        entries = read_prompts(prompts)
        return await self._run(self._encode, entries, self._params_of(sampling_params, len(entries)), False)

    async def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[GenerationOutput]:
        """Answer each conversation; see `LLM.chat`."""
        conversations = read_conversations(messages)
        params = self._params_of(sampling_params, len(conversations), max_tokens=None)
        encode = partial(self._encode_chat, kwargs=read_chat_fields({"tools": tools}, chat_template_kwargs))
        return await self._run(encode, conversations, params, False)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> AsyncGenerator[TextPart, None]:
        """Continue one prompt piece by piece; see `LLM.stream`."""
        (entry,), (params,) = read_prompts(prompt), self._params_of(sampling_params, 1)
        return self._pieces(self._encode(entry, params))

    def stream_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[TextPart, None]:
        """Answer one conversation piece by piece; see `LLM.stream_chat`."""
        (params,) = self._params_of(sampling_params, 1, max_tokens=None)
        return self._pieces(self._encode_chat(read_conversation(messages), params))

    async def _pieces(self, encode: Coroutine[Any, Any, _Job]) -> AsyncGenerator[TextPart, None]:
        items: asyncio.Queue[TextPart | None] = asyncio.Queue()
        task = asyncio.ensure_future(self._stream(await encode, items.put_nowait))
        task.add_done_callback(lambda _: items.put_nowait(None))
        try:
            while (item := await items.get()) is not None:
                yield item
            await task
        finally:
            task.cancel()


async def _encoded(text: Sized, encode: Callable[[], list[int]]) -> list[int]:
    """Call `encode`; for a long text in a thread, outside the interpreter lock."""
    return encode() if len(text) < LONG_TEXT_CHARS else await in_slow_thread(encode)


async def _all_or_none(
    work: Callable[..., Coroutine[Any, Any, T]], arguments: Sequence[tuple[Any, ...]], at_once: int
) -> list[T]:
    """Do `work` for all arguments and return the results in order; if one fails, cancel the others and raise its error.

    Between two of them the event loop has its turn.
    """
    todo, results = enumerate(arguments), dict[int, T]()

    async def take() -> None:
        for i, given in todo:
            results[i] = await work(*given)
            await asyncio.sleep(0)

    tasks = [asyncio.ensure_future(take()) for _ in range(min(at_once, len(arguments)))]
    try:
        await asyncio.gather(*tasks)
        return [results[i] for i in range(len(results))]
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _progress_bar(total: int, shown: bool) -> Progress:
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), disable=not shown)
    bar.add_task("generating", total=total)
    return bar
