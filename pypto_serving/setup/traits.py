"""Check, before anything starts, that a backend's programs can do what the options ask for."""

from __future__ import annotations

from pypto_serving.errors import ConfigError
from pypto_serving.setup.options import Options
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import resume_step


def check_traits(options: Options, engine: EngineConfig) -> None:
    """Raise ConfigError for what the backend's programs cannot do, naming the option to change."""
    traits, chunk = engine.traits, engine.traits.chunk_tokens
    rows = max(traits.padded_rows, default=engine.max_num_seqs)
    if engine.max_num_seqs > rows:
        label = options.label("max_num_seqs")
        raise ConfigError(
            f"{label} is {engine.max_num_seqs}, but the {engine.backend} backend computes at most {rows} sequences at "
            f"once; give at most {rows}"
        )
    beside_decodes = chunk + 1 if chunk > 1 else 1
    for name, least in (("max_num_batched_tokens", beside_decodes), ("long_prefill_token_threshold", chunk)):
        value = getattr(engine, name)
        if engine.enable_chunked_prefill and 0 < value < least:
            raise ConfigError(
                f"{options.label(name)} is {value}, but the {engine.backend} backend computes prompts in chunks of "
                f"{chunk} tokens; give at least {least}"
            )
    if resume_step(engine.groups) % chunk:
        raise ConfigError(
            f"{options.label('block_size')} lets prompts be resumed every {resume_step(engine.groups)} tokens, but the "
            f"{engine.backend} backend computes them in chunks of {chunk}; give a multiple of {chunk}"
        )
    if engine.num_drafts > traits.max_drafts:
        raise ConfigError(
            f"{engine.num_drafts} draft tokens are asked for, but the {engine.backend} backend verifies at most "
            f"{traits.max_drafts}; ask for fewer"
        )
