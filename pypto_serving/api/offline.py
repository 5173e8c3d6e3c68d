"""The offline API: `LLM`, for programs that generate without a server."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pypto_serving.api.chat.output import OutputParser, TextPart, ToolCall, read_output
from pypto_serving.api.openai.choice import Choice
from pypto_serving.api.openai.params import parseable
from pypto_serving.api.openai.prompts import check_ids, encode_chat, encode_text, fit_max_tokens
from pypto_serving.api.service import Service
from pypto_serving.api.settings import load_serving_config
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.engine.async_engine import AsyncEngine
from pypto_serving.errors import EngineDeadError, RequestError, RequestFailedError
from pypto_serving.setup.options import make_options
from pypto_serving.setup.prepare import model_spec, prepare
from pypto_serving.types.request import EngineRequest, RequestOutput, TokenLogprobs
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.tokens import pack_ids, unpack_ids

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log-probability of a token at its place; `rank` 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice. `logprobs[i]` maps token ids at place i, the chosen one among them, to their values.

    Where the model's family marks them in chats, `reasoning` and `tool_calls` stand beside the text, not in it.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """What `generate` and `chat` return for one prompt. `prompt` is None where ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class _Job:
    """An encoded prompt and what reads its outputs. `text` is None where ids were given."""

    text: str | None
    ids: list[int]
    new_parser: Callable[[], OutputParser] | None = None


class LLM:
    """A model in its own engine and worker processes, for offline use; also a context manager.

    `model` is a folder or a hub name, None for the bundled one; `options` are named as on the command line, such as
    `max_model_len` or `kv_memory`. Raises ConfigError or ModelError for what cannot work, EngineDeadError when
    the worker cannot be started.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        chosen = make_options({"model": model, **options})
        spec = model_spec(chosen)
        resolved = prepare(chosen, spec)
        server = resolved.server
        serving = load_serving_config(
            spec.path,
            architecture=spec.architecture,
            served_model_names=server.served_model_names,
            chat_template=server.chat_template,
        )
        self._ids = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pypto-llm", daemon=True)
        self._thread.start()
        self._engine = AsyncEngine(resolved.engine)
        try:
            self._service = Service(self._engine, serving)
            self._call(self._start)
        except BaseException:
            self.shutdown()
            raise

    async def _start(self) -> None:
        await self._engine.start()
        await self._engine.wait_ready()

    def _call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of work in the engine's event loop."""
        if not self._loop.is_running():
            raise EngineDeadError("this LLM was shut down; make a new one")
        future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def shutdown(self) -> None:
        """End the engine and its worker. May be called more than once."""
        if not self._thread.is_alive():
            return
        self._call(self._engine.stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.shutdown()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[GenerationOutput]:
        """Continue each prompt, a text or a list of token ids; results in the order of the prompts.

        One SamplingParams for all or one each; None means the model's own defaults with 16 tokens. Raises
        RequestError for a prompt that does not fit, RequestFailedError for one that the engine gave up.
        """
        entries = _as_list(prompts)
        params = self._params_of(sampling_params, len(entries), max_tokens=16)
        return self._call(lambda: self._run([self._encode(entry) for entry in entries], params, progress))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = True,
    ) -> list[GenerationOutput]:
        """Answer each conversation, in order. None as parameters means the model's defaults up to its end."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        params = self._params_of(sampling_params, len(conversations), max_tokens=None)
        encode = partial(self._encode_chat, kwargs=chat_template_kwargs)
        return self._call(lambda: self._run(list(map(encode, conversations)), params, progress))

    def stream_chat(self, messages: Messages, sampling_params: SamplingParams | None = None) -> Iterator[TextPart]:
        """Answer one conversation, piece by piece; closing the iterator ends the request.

        Reasoning, where the model's family marks it, is told from content; tool calls are left out.
        """
        (params,) = self._params_of(sampling_params, 1, max_tokens=None)
        pieces: SimpleQueue[TextPart | BaseException | None] = SimpleQueue()

        async def pump() -> None:
            try:
                job = await self._encode_chat(messages, None)
                await self._put_parts(job, params, pieces.put)
                pieces.put(None)
            except BaseException as error:
                pieces.put(error)
                raise

        task = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            task.cancel()

    def _params_of(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int, max_tokens: int | None
    ) -> list[SamplingParams]:
        if given is None:
            given = SamplingParams(**self._service.serving.default_sampling.given(), max_tokens=max_tokens)
        params = [given] * count if isinstance(given, SamplingParams) else list(given)
        if len(params) != count:
            raise RequestError(f"{len(params)} sampling_params for {count} prompts; give one, or one for each")
        return params

    async def _encode(self, prompt: Prompt) -> _Job:
        if isinstance(prompt, str):
            return _Job(prompt, await encode_text(self._service, prompt, "prompt", add_special_tokens=True))
        ids = [int(i) for i in prompt]
        if not ids:
            raise RequestError("a prompt is an empty list; give at least one token id", param="prompt")
        return _Job(None, check_ids(self._service, ids, "prompt"))

    async def _encode_chat(self, messages: Messages, kwargs: Mapping[str, Any] | None) -> _Job:
        chat = self._service.chat_encoder.encode(messages, {"add_generation_prompt": True, **(kwargs or {})})
        ids = await encode_chat(self._service, chat, add_special_tokens=False)
        return _Job(chat.prompt if isinstance(chat.prompt, str) else None, ids, chat.new_parser)

    async def _run(
        self,
        encoding: Sequence[Coroutine[Any, Any, _Job]],
        params: Sequence[SamplingParams],
        progress: bool,
    ) -> list[GenerationOutput]:
        jobs = await asyncio.gather(*encoding)
        fitted = [self._fit(job, wanted) for job, wanted in zip(jobs, params, strict=True)]
        widest = max((wanted.n for wanted in params), default=1)
        room = asyncio.Semaphore(max(1, self._engine.config.max_queued_requests // widest))
        with _progress_bar(len(jobs), progress) as bar:

            async def one(job: _Job, wanted: SamplingParams) -> GenerationOutput:
                async with room:
                    output = await self._generate(job, wanted)
                bar.advance(bar.task_ids[0])
                return output

            return await _all_or_none([one(job, wanted) for job, wanted in zip(jobs, fitted, strict=True)])

    def _fit(self, job: _Job, params: SamplingParams) -> SamplingParams:
        for token_id in params.stop_token_ids:
            if token_id >= self._engine.config.vocab_size:
                raise RequestError(f"stop_token_ids: {token_id} is no token of this model", param="stop_token_ids")
        limit = fit_max_tokens(len(job.ids), params.max_tokens, None, self._engine.config.max_model_len)
        params = msgspec.structs.replace(params, max_tokens=limit)
        return params if job.new_parser is None else parseable(params)

    async def _generate(self, job: _Job, params: SamplingParams) -> GenerationOutput:
        requests = self._requests(job.ids, params)
        sequences = {r.request_id: _Sequence(i, r, job, self._service.tokenizer) for i, r in enumerate(requests)}
        await self._receive(requests, lambda output: self._take(sequences[output.request_id], output))
        done = list(sequences.values())
        num_cached = done[0].choice.num_cached
        return GenerationOutput(requests[0].request_id, job.text, job.ids, [s.result() for s in done], num_cached)

    async def _put_parts(self, job: _Job, params: SamplingParams, put: Callable[[TextPart], None]) -> None:
        (request,) = self._requests(job.ids, self._fit(job, params))
        sequence = _Sequence(0, request, job, self._service.tokenizer)
        parser = None if job.new_parser is None else job.new_parser()

        def take(output: RequestOutput) -> None:
            text = self._take(sequence, output)
            if parser is not None:
                ended = sequence.choice.finish_reason is not None
                parts = parser.push(text) + (parser.finish() if ended else [])
            else:
                parts = [TextPart("content", text)] if text else []
            for part in parts:
                if isinstance(part, TextPart):
                    put(part)

        await self._receive([request], take)

    def _take(self, sequence: _Sequence, output: RequestOutput) -> str:
        """Add an output to its sequence; one that found its stop string is ended."""
        text = sequence.take(output)
        if sequence.choice.finish_reason is not None and output.finish_reason is None:
            self._engine.abort([output.request_id])
        return text

    async def _receive(self, requests: Sequence[EngineRequest], take: Callable[[RequestOutput], object]) -> None:
        """Hand over outputs until every request ended; raises RequestFailedError for one that the engine gave up."""

        def take_all(outputs: list[RequestOutput]) -> None:
            for output in outputs:
                if output.fault is not None:
                    raise RequestFailedError(output.fault.message, code=output.fault.code)
                take(output)

        await self._engine.submit(requests).deliver_to(take_all)

    def _requests(self, ids: list[int], params: SamplingParams) -> list[EngineRequest]:
        seed = (self._service.draw_seed() if params.seed is None else params.seed) & (2**64 - 1)
        name, alone = f"offline-{next(self._ids)}", msgspec.structs.replace(params, n=1)
        return [
            EngineRequest(
                request_id=f"{name}-{choice}",
                token_ids=pack_ids(ids),
                params=alone,
                eos_token_ids=self._service.eos_token_ids,
                seed=seed,
                choice=choice,
                arrival_s=time.monotonic(),
            )
            for choice in range(params.n)
        ]


class _Sequence:
    """Collects one choice."""

    def __init__(self, index: int, request: EngineRequest, job: _Job, tokenizer: Tokenizer | None) -> None:
        self.choice = Choice(index, request.request_id, job.ids, request.params, tokenizer)
        self._new_parser = job.new_parser
        self._tokenizer = tokenizer
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] | None = None if request.params.logprobs is None else []

    def take(self, output: RequestOutput) -> str:
        """The text that `output` adds; nothing once a stop string was found."""
        if self.choice.finish_reason is not None:
            return ""
        before = self.choice.num_tokens
        delta = self.choice.take(output)
        count = self.choice.num_tokens - before
        ids = unpack_ids(output.token_ids)[:count].tolist()
        self._token_ids += ids
        if self._logprobs is not None and output.logprobs is not None:
            self._logprobs += map(self._entry, ids, output.logprobs)
        text = "" if delta is None else delta.text
        self._texts.append(text)
        return text

    def _entry(self, token_id: int, values: TokenLogprobs) -> dict[int, Logprob]:
        top_ids = unpack_ids(values.top_ids).tolist()
        top = np.frombuffer(values.top_logprobs, dtype="<f4").tolist()
        entry = {i: Logprob(v, rank, self._text(i)) for rank, (i, v) in enumerate(zip(top_ids, top, strict=True), 1)}
        return entry | {token_id: Logprob(values.logprob, values.rank, self._text(token_id))}

    def _text(self, token_id: int) -> str:
        return "" if self._tokenizer is None else self._tokenizer.token_bytes(token_id).decode(errors="replace")

    def result(self) -> CompletionOutput:
        reason = self.choice.finish_reason or "abort"
        index, ids, logprobs = self.choice.index, self._token_ids, self._logprobs
        if self._new_parser is None:
            return CompletionOutput(index, "".join(self._texts), ids, logprobs, reason)
        read = read_output(self._new_parser(), self._texts)
        return CompletionOutput(index, read.content, ids, logprobs, reason, read.reasoning, read.tool_calls)


async def _all_or_none(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order; where one fails, the others are ended before its error is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several: a list that starts with an integer is one prompt of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    entries = list(prompts)
    return [entries] if entries and isinstance(entries[0], int) else entries  # type: ignore[list-item, return-value]


def _progress_bar(total: int, shown: bool) -> Progress:
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), disable=not shown)
    bar.add_task("generating", total=total)
    return bar
