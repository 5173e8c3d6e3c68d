"""Refuse what can never be served: requests beyond the limits of model or program, and KV pools that are too small."""

from __future__ import annotations

from pypto_serving.errors import ConfigError, RequestError
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.request import EngineRequest, RequestFault
from pypto_serving.types.sampling import SamplingParams, adjusting, check_named_ids, guiding


def require_blocks(config: EngineConfig, num_blocks: tuple[int, ...]) -> None:
    """Raise ConfigError if any group's pool is too small for one request of the longest length.

    Tiers below the device need one more block, to move it. `num_blocks` counts each pool's null block.
    """
    more = " and tiers one more" if config.cache.tiers else ""
    for group, available, needed in zip(config.cache.groups, num_blocks, config.longest_blocks, strict=True):
        if needed + bool(config.cache.tiers) > available - 1:
            raise ConfigError(
                f"KV group {group.name} has {available - 1} blocks, a request of {config.limits.max_model_len} tokens "
                f"needs {needed}{more}; raise the option kv-memory or lower the option max-model-len"
            )


def unservable(source: EngineRequest, config: EngineConfig) -> RequestFault | None:
    """Return why a request can never be served, or None."""
    num_tokens = len(source.token_ids) // 4
    if num_tokens == 0:
        return RequestFault(400, "empty_prompt", "the prompt has no tokens; send at least one")
    if num_tokens >= config.limits.max_model_len:
        message = (
            f"the prompt has {num_tokens} tokens, but the context window has {config.limits.max_model_len} and at "
            "least one is for output; shorten the prompt"
        )
        return RequestFault(400, "context_length_exceeded", message)
    return _beyond_program(source.params, config)


def _beyond_program(params: SamplingParams, config: EngineConfig) -> RequestFault | None:
    """Return which sampling parameter exceeds the program or the vocabulary, or None."""
    limit = config.limits.traits.max_logprobs
    if params.logprobs is not None and params.logprobs > limit:
        given = f"at most {limit} log-probabilities" if limit >= 0 else "no log-probabilities"
        return RequestFault(
            400, "unsupported_logprobs", f"logprobs is {params.logprobs}, but this device gives {given}"
        )
    if params.logprob_token_ids and config.limits.traits.samples_on_device:
        message = "logprob_token_ids is given, but this device gives log-probabilities of the most likely tokens only"
        return RequestFault(400, "unsupported_logprobs", message)
    if params.prompt_logprobs is not None and not config.limits.max_prompt_logprobs:
        message = "prompt_logprobs, or echo with logprobs, is asked for, but this device gives none; leave it out"
        return RequestFault(400, "unsupported_prompt_logprobs", message)
    if not config.limits.traits.adjusts_logits and (names := adjusting(params) + guiding(params)):
        message = f"this device cannot change logits, so it cannot do what {names[0]} asks for; leave it out"
        return RequestFault(400, "unsupported_adjustment", message)
    try:
        check_named_ids(params, config.model.vocab_size)
    except RequestError as error:
        return RequestFault(error.status, "invalid_token_id", str(error))
    return None
