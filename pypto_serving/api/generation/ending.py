"""Write the log line and the trace spans of a generation that has ended."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from pypto_serving.api.generation.choice import Choice, TokenUsage, count_usage
from pypto_serving.api.generation.request import GenerationRequest
from pypto_serving.api.http.tracing import RequestTrace
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.logs import with_fields
from pypto_serving.types.request import Timeline
from pypto_serving.types.tier import TIERS
from pypto_serving.util import counted

logger = logging.getLogger("pypto_serving.api")

ABORTED = "abort"
"""Finish reason of a choice whose client disconnected."""
MAX_TRACED = 16
"""Trace the phases of at most this many choices of a request, since each makes several spans."""
MAX_LOGGED = 16
"""Log at most this many prompts of a request, since hundreds would block the event loop."""


def log_end(
    request: GenerationRequest, choices: Sequence[Choice], tokenizer: Tokenizer | None, max_log_len: int
) -> None:
    """Log an ended request in one line: tokens, finish reasons, times of the first choice, parameters, prompts.

    Of the first MAX_LOGGED prompts, log the first `max_log_len` characters, or token ids without a tokenizer.
    """
    usage, reasons = count_usage(choices), Counter(choice.finish_reason or ABORTED for choice in choices)
    ends = ", ".join(reason if count == 1 else f"{count} x {reason}" for reason, count in reasons.items())
    timeline = choices[0].timeline
    params, times = request.params, {} if timeline is None else _times(timeline)
    fields = {
        "generation_id": request.id,
        "num_choices": len(choices),
        "finish_reasons": dict(reasons),
        "prompt_tokens": usage.num_prompt_tokens,
        "cached_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_output_tokens,
        **{f"{name}_s": round(seconds, 6) for name, seconds in times.items()},
        "max_tokens": request.prompts[0].max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
    }
    logged = request.prompts[:MAX_LOGGED] if max_log_len else ()
    shown = [_beginning(prompt.token_ids, tokenizer, max_log_len) for prompt in logged]
    if shown:
        fields["prompts"] = shown
    logger.info(
        "%s: %s (%d cached), %s, ended by %s%s, temperature %g, top_p %g%s",
        request.id,
        counted(usage.num_prompt_tokens, "prompt token"),
        usage.num_cached_tokens,
        counted(usage.num_output_tokens, "output token"),
        ends,
        "".join(f", {name} {seconds:.3f} s" for name, seconds in times.items()),
        params.temperature,
        params.top_p,
        "".join(f", prompt {text!r}" for text in shown),
        extra=with_fields(**fields),
    )


def _times(timeline: Timeline) -> dict[str, float]:
    return {
        "queue": timeline.scheduled_s - timeline.arrival_s,
        "prefill": timeline.first_token_s - timeline.scheduled_s,
        "decode": timeline.finished_s - timeline.first_token_s,
    }


def _beginning(token_ids: Sequence[int], tokenizer: Tokenizer | None, length: int) -> str:
    """Return about the first `length` characters of a prompt; fewer if its tokens are parts of characters."""
    ids = list(token_ids[:length])
    return str(ids) if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)[:length]


def trace_end(trace: RequestTrace, request: GenerationRequest, choices: Sequence[Choice], model: str) -> None:
    """Describe an ended request in its trace, with a span for each phase of its first choices."""
    usage, params = count_usage(choices), request.params
    trace.describe(
        {
            "gen_ai.request.model": model,
            "gen_ai.request.n": params.n,
            "gen_ai.request.max_tokens": request.prompts[0].max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.response.id": request.id,
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": [choice.finish_reason or ABORTED for choice in choices],
            **_usage_attributes(usage, len(choices)),
        }
    )
    timed = [choice for choice in choices if choice.timeline is not None]
    if timed:
        trace.describe(_latencies([choice.timeline for choice in timed if choice.timeline is not None]))
    for choice in timed[:MAX_TRACED]:
        _trace_phases(trace, choice)


def _usage_attributes(usage: TokenUsage, num_choices: int) -> dict[str, int]:
    """Return token counts, under the names of OpenTelemetry's conventions and of vLLM."""
    by_tier = zip(TIERS, usage.cached_by_tier, strict=True)
    return {
        "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
        "gen_ai.usage.output_tokens": usage.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.num_cached_tokens,
        "gen_ai.usage.prompt_tokens": usage.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": usage.num_output_tokens,
        "gen_ai.usage.num_sequences": num_choices,
        **{f"pypto.cached_tokens.{tier}": count for tier, count in by_tier if count},
    }


def _latencies(timelines: Sequence[Timeline]) -> dict[str, float | int]:
    """Return the latencies of a request, in seconds. A phase begins with its first choice; the last choice ends all."""
    arrival_s = min(each.arrival_s for each in timelines)
    scheduled_s = min(each.scheduled_s for each in timelines)
    first_s, finished_s = min(each.first_token_s for each in timelines), max(each.finished_s for each in timelines)
    return {
        "gen_ai.latency.time_in_queue": scheduled_s - arrival_s,
        "gen_ai.latency.time_to_first_token": first_s - arrival_s,
        "gen_ai.latency.time_in_model_prefill": first_s - scheduled_s,
        "gen_ai.latency.time_in_model_decode": finished_s - first_s,
        "gen_ai.latency.time_in_model_inference": finished_s - scheduled_s,
        "gen_ai.latency.e2e": finished_s - arrival_s,
        "pypto.num_preemptions": sum(each.num_preemptions for each in timelines),
    }


def _trace_phases(trace: RequestTrace, choice: Choice) -> None:
    timeline, of = choice.timeline, {"gen_ai.choice.index": choice.index}
    assert timeline is not None
    cached = {"gen_ai.usage.cache_read.input_tokens": choice.num_cached}
    tokens = {"gen_ai.usage.input_tokens": choice.num_prompt}
    trace.phase("queue", timeline.arrival_s, timeline.scheduled_s or timeline.finished_s, of)
    for start_s, end_s in zip(timeline.loads[::2], timeline.loads[1::2], strict=True):
        from_tiers = zip(TIERS, choice.cached_by_tier, strict=False)
        loaded = {f"pypto.cached_tokens.{tier}": count for tier, count in from_tiers if tier != TIERS[0] and count}
        trace.phase("load", start_s, end_s, of | loaded)
    if timeline.scheduled_s:
        trace.phase("prefill", timeline.scheduled_s, timeline.first_token_s, of | tokens | cached)
        out = {"gen_ai.usage.output_tokens": choice.num_tokens}
        trace.phase("decode", timeline.first_token_s, timeline.finished_s, of | out)
