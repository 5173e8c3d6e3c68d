"""The memory planner: decide the longest sequence, and the KV memory beside weights and workspace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from pypto_serving.backend.defaults import BackendDefaults
from pypto_serving.errors import ConfigError
from pypto_serving.limits import MAX_MATCHER_BYTES
from pypto_serving.parallel.topology import Topology
from pypto_serving.setup.host import HostFacts
from pypto_serving.setup.kv_shares import MemoryPlan, max_sequence_bytes, plan_groups, resume_bytes
from pypto_serving.setup.options import Options
from pypto_serving.setup.ranks import RankWorkspace
from pypto_serving.setup.rules import MAX_KV_BYTES
from pypto_serving.types.config import NGRAM_TOKEN_BYTES, Speculation
from pypto_serving.types.kv import KVCacheGroupSpec, publication_lag
from pypto_serving.types.model import ModelSpec
from pypto_serving.types.step import BackendLimits
from pypto_serving.util import ceil_div, format_size, one_of

PROCESS_BYTES, TOKEN_BYTES = 256 << 20, 3072
"""Memory of all processes apart from weights, KV, activations and grammar matchers: a base, and bytes per vocabulary
token.

Processes: API process, core, worker; on demand, the reader with three copies, and the guide process. The API process
and two copies hold the tokenizer, the guide a compiler. Measured: 210 MiB with 640 tokens, 500 MiB with 151,936.
"""


MIN_LENGTH_SHARE = 0.25
"""The least share of the model's longest sequence that is served without being asked for."""
CARD_BYTES = 2 << 30
"""What the driver, kernels and graphs take of a card's memory, and room that they leave unused between allocations."""


class TooLittleMemoryError(ConfigError):
    """The weights alone leave no memory for a sequence."""


class MemoryPlanner:
    """Decides the longest sequence and the KV memory. All sizes depend on the longest sequence.

    Raises ConfigError that names the option to change.
    """

    def __init__(
        self,
        options: Options,
        model: ModelSpec,
        host: HostFacts,
        backend: BackendDefaults,
        max_num_seqs: int,
        topology: Topology,
        kernels: str = "",
        speculation: Speculation | None = None,
    ) -> None:
        self.options = options
        self.model = model
        self.host_available = self.available_bytes = host.available_bytes
        if backend.cards:
            self.available_bytes = min(card.free_bytes for card in host.cards[: host.num_replicas])
        self.num_replicas = host.num_replicas
        self.backend = backend
        self.max_num_seqs = max_num_seqs
        self.kernels = kernels
        self.num_drafts = speculation.num_speculative_tokens if speculation else 0
        self.ngram = speculation.ngram if speculation else None
        self.topology = topology
        self.chunked = options.chunked_prefill is not False
        self.weight_bytes = 0 if backend.simulated else model.weight_bytes
        self.host_bytes = self._host_bytes()
        self.warnings: list[str] = []
        self.tiered = bool(self.host_bytes or options.kv_disk or options.kv_remote)

    def step_tokens(self, model_len: int) -> int:
        """Return the token budget of a step."""
        given: int | None = self.options.max_num_batched_tokens
        if given is not None:
            return given
        default = self.backend.max_num_batched_tokens
        return default if self.chunked else max(default, model_len)

    def model_len(self) -> tuple[int, str]:
        """Decide the length of the longest sequence in tokens; return it with the reason."""
        self._check_room()
        limit, reason = self._longest()
        given = self.options.given_length
        if given is not None:
            self._check_given_len(given)
            return given, self.options.origin("max_model_len")
        budget = self.options.max_num_batched_tokens
        if not self.chunked and budget is not None and budget < limit:
            limit, reason = budget, "max-num-batched-tokens, because chunked prefill is off"
        best = largest(self._fits_beside_others, limit)
        if best < min(2, limit):
            best = largest(self._fits, limit)
        if best < min(2, limit):
            raise self._too_little(min(2, limit), 0)
        if best < limit:
            allowed, whose = self._longest()
            reason = f"the longest that fits the KV memory; {whose} is {allowed}"
            self._check_share(best, limit)
        return best, reason

    def _longest(self) -> tuple[int, str]:
        """Return the longest sequence that both the model and the backend's programs allow, and whose limit it is."""
        longest, programs = self.model.max_position_embeddings, self.backend.longest
        if programs and programs < longest:
            return programs, "the programs' longest sequence"
        return longest, "the model's window of attention" if self.model.window else "the model's longest sequence"

    def plan(self, model_len: int) -> tuple[MemoryPlan, str]:
        """Plan for sequences of up to `model_len` tokens; return the plan, and the reason for the KV memory."""
        groups = plan_groups(
            self.model.kv_groups,
            self._kv_limit(model_len),
            model_len,
            self._uncommitted(model_len, self.step_tokens(model_len)),
            self._uncommitted(model_len, 1),
            self.max_num_seqs,
            self.tiered,
        )
        plan = MemoryPlan(
            groups=groups,
            weight_bytes=self.weight_bytes,
            workspace_bytes=self._workspace(model_len),
            available_bytes=self.available_bytes,
            on_card=self.backend.cards,
        )
        reason = self._kv_reason()
        if plan.num_sequences >= self.max_num_seqs:
            reason += f"; no more than {self.max_num_seqs} sequences of {model_len} tokens can use"
        return plan, reason

    def _uncommitted(self, model_len: int, step_tokens: int) -> int:
        """Count the tokens of one sequence, at `step_tokens` per step, that may be computed but not committed."""
        return min(model_len, step_tokens) * self.backend.depth + publication_lag(self.model.kv_groups)

    def rank_workspace(self, model_len: int) -> RankWorkspace:
        """Describe the workspace of each rank."""
        limits = self.limits(model_len)
        sampled = min(limits.max_logits - limits.max_prompt_logprobs, limits.max_num_batched_tokens)
        sampled_bytes = 4 * self.model.vocab_size * ceil_div(sampled, limits.traits.stages)
        return RankWorkspace(
            torch=self.kernels == "torch",
            activation_bytes=activation_bytes(self.model, limits.max_num_batched_tokens),
            logits_bytes=sampled_bytes,
            scored_bytes=logits_bytes(self.model, limits) - sampled_bytes,
            position_bytes=self.model.position_bytes * model_len,
            row_bytes=self._row_bytes(limits),
            slots=self._num_buffers(limits),
            step_tokens=limits.max_num_batched_tokens,
        )

    def _follower_bytes(self, model_len: int) -> int:
        """Return the workspace of all ranks of the host except the leader."""
        parts, (_, *followers) = self.model.parts, self.topology.on_host(0)
        if parts is None or not followers:
            return 0
        workspace = self.rank_workspace(model_len)
        return sum(workspace.num_bytes(rank, parts) + workspace.scoring_bytes(rank) for rank in followers)

    def _workspace(self, model_len: int) -> int:
        if self.backend.simulated:
            return 0
        limits = self.limits(model_len)
        leading = self.model.position_bytes * model_len + self._row_bytes(limits)
        leading += workspace_bytes(self.model, limits)
        return leading + self._follower_bytes(model_len)

    def _row_bytes(self, limits: BackendLimits) -> int:
        """Return the bytes of all rows in the worker, including the index of n-gram drafts."""
        index = NGRAM_TOKEN_BYTES * limits.max_num_seqs * limits.max_model_len if self.ngram else 0
        return row_bytes(self.model.kv_groups, limits, self._num_buffers(limits)) + index

    def _num_buffers(self, limits: BackendLimits) -> int:
        """Return the number of the worker's step buffers; draft layers of the model need one more."""
        return limits.held_dispatches + (self.num_drafts > 0 and self.ngram is None)

    def limits(self, model_len: int) -> BackendLimits:
        """Return the limits of programs for sequences of up to `model_len` tokens."""
        return BackendLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.step_tokens(model_len),
            max_model_len=model_len,
            depth=self.backend.depth,
            traits=msgspec.structs.replace(self.backend.traits, max_drafts=self.num_drafts),
        )

    def _room(self, model_len: int) -> int:
        """Return the bytes that weights, workspace and host tier leave for KV."""
        if self.backend.simulated or self.backend.own_memory:
            return MAX_KV_BYTES
        taken = CARD_BYTES if self.backend.cards else self.host_bytes
        return self.available_bytes - self.weight_bytes - self._workspace(model_len) - taken

    def _host_bytes(self) -> int:
        """Return the bytes of the host tier."""
        given = self.options.kv_host_memory
        if given is None:
            return 0
        return int(given * self.host_available) if isinstance(given, float) else given

    def _kv_limit(self, model_len: int) -> int:
        """Return the bytes that KV may take, null blocks included."""
        given, share = self.options.kv_memory, self.options.gpu_memory_utilization
        if given is None:
            left = max(0, min(self._room(model_len), self.available_bytes))
            if share is not None:
                return max(0, left - int((1 - share) * self.available_bytes))
            return int(left * self.backend.kv_share)
        return int(given * self.available_bytes) if isinstance(given, float) else given

    def _kv_needed(self, model_len: int) -> int:
        """Return the bytes of one sequence of `model_len` tokens, null blocks included."""
        uncommitted = self._uncommitted(model_len, self.step_tokens(model_len))
        return max_sequence_bytes(self.model.kv_groups, model_len, uncommitted, self.tiered)

    def _kv_wanted(self, model_len: int) -> int:
        """Return the bytes with which `model_len` tokens are served without being asked for."""
        need = self._kv_needed(model_len)
        return need + min(self._others_bytes(model_len), need)

    def _fits(self, model_len: int) -> bool:
        return self._kv_needed(model_len) <= self._kv_limit(model_len) <= self._room(model_len)

    def _fits_beside_others(self, model_len: int) -> bool:
        limit = self._kv_limit(model_len)
        others = min(self._others_bytes(model_len), limit // 2)
        return self._fits(model_len) and self._kv_needed(model_len) + others <= limit

    def _others_bytes(self, model_len: int) -> int:
        """Return the bytes with which all other sequences can be resumed."""
        each = resume_bytes(self.model.kv_groups, model_len, self._uncommitted(model_len, 1))
        return (self.max_num_seqs - 1) * each

    def _kv_reason(self) -> str:
        given, total = self.options.kv_memory, self.options.gpu_memory_utilization
        if given is None and total is not None:
            return f"what weights and workspace leave of {total:.0%} of {self._free}"
        if given is None:
            share = "half" if self.backend.kv_share == 0.5 else f"{self.backend.kv_share:.0%}"
            return f"{share} of {self._free}" + ("" if self.backend.simulated else " less weights and workspace")
        share = f": {given:g} of {self._free}" if isinstance(given, float) else ""
        return self.options.origin("kv_memory") + share

    @property
    def _free(self) -> str:
        each = " on the card" if self.backend.cards else each_of(self.num_replicas)
        return f"{format_size(self.available_bytes)} free{each}"

    def _check_room(self) -> None:
        """Raise ConfigError if not even the shortest sequence has room."""
        if self.backend.cards and self.host_bytes > self.host_available:
            given, most = format_size(self.host_bytes), size_option(self.host_available)
            raise self.options.refusal("kv_host_memory", f"is {given}; this host has {most} free; give less")
        room = self._room(2)
        weights, workspace = format_size(self.weight_bytes), format_size(self._workspace(2))
        tiered = self.host_bytes and not self.backend.cards
        host = f", the host tier {format_size(self.host_bytes)}" if tiered else ""
        taken = f"weights take {weights}{host} and the workspace {workspace} of {self._free}"
        if room <= 0:
            raise TooLittleMemoryError(f"too little memory: {taken}; {self._how_to_shrink()}")
        if (asked := self._kv_limit(2)) > room:
            problem = f"is {format_size(asked)}, but {taken}; give at most {size_option(room)}"
            raise self.options.refusal("kv_memory", problem)

    def _how_to_shrink(self) -> str:
        if self.num_replicas > 1 and not self.backend.cards:
            return f"lower {self.options.label('data_parallel_size')}, or free memory"
        if self.host_bytes and not self.backend.cards:
            return f"lower {self.options.label('kv_host_memory')}"
        if self.weight_bytes < self.available_bytes:
            budget, rows = map(self.options.label, ("max_num_batched_tokens", "max_num_seqs"))
            return f"lower {budget} or {rows}, or free memory"
        smaller = f"give {self.options.giving('dtype', 'bfloat16')}, " if self.model.dtype == "float32" else ""
        return f"{smaller}choose a smaller {self.options.label('model')}, or free memory"

    def _check_share(self, best: int, limit: int) -> None:
        """Warn that only `best` of `limit` tokens fit. Raise ConfigError if that is a small share nobody asked for."""
        options = self.options
        if options.max_model_len == "auto" or self.backend.simulated:
            return
        memory = f"{format_size(self._kv_limit(best))}{each_of(self.num_replicas)}"
        found = f"of the model's {limit} tokens only {best} fit the KV memory of {memory}"
        ways = [options.giving("max_model_len", "auto")]
        if (need := self._kv_wanted(limit)) <= self._room(limit):
            ways.append(options.giving("kv_memory", f"{size_option(need, up=True)} or more"))
        if best < limit * MIN_LENGTH_SHARE:
            raise ConfigError(f"{found}; give {one_of(ways)}")
        self.warnings.append(f"{found}; {one_of(ways)} says what is wanted")

    def _check_given_len(self, given: int) -> None:
        label, (limit, whose) = self.options.label("max_model_len"), self._longest()
        if given > limit:
            raise ConfigError(f"{label} is {given}, but {whose} is {limit}; give at most {limit}")
        budget = self.options.max_num_batched_tokens
        if not self.chunked and budget is not None and budget < given:
            chunked = self.options.giving("chunked_prefill", True)
            raise ConfigError(
                f"{self.options.label('max_num_batched_tokens')} is {budget}, but without chunked prefill a "
                f"step holds a whole prompt, and {label} is {given}; give at least {given}, or {chunked}"
            )
        if not self._fits(given):
            raise self._too_little(given, largest(self._fits, given))

    def _too_little(self, model_len: int, best: int) -> ConfigError:
        """Make the error for a length that does not fit; `best` is the largest that fits, or 0."""
        need, limit = self._kv_needed(model_len), self._kv_limit(model_len)
        options = self.options
        ways = [options.giving("max_model_len", f"{best} or less")] if best >= 2 else []
        enough = need if options.max_model_len is not None else self._kv_wanted(self._longest()[0])
        if enough <= self._room(model_len):
            ways.append(options.giving("kv_memory", f"{size_option(enough, up=True)} or more"))
        if not ways:
            ways = [f"a smaller {options.label('model')}", f"a smaller {options.label('block_size')}, or free memory"]
        asked = options.given_length is not None
        why = f"given by {options.label('max_model_len')}" if asked else "the shortest there is"
        return ConfigError(
            f"{options.label('kv_memory')} is {format_size(limit)}{each_of(self.num_replicas)}, too little for one "
            f"sequence of {model_len} tokens, {why}, which needs {format_size(need)}; give {one_of(ways)}"
        )


def each_of(num_replicas: int) -> str:
    """Return words to append to a size that applies to each of several replicas; "" for one replica."""
    return f" for each of {num_replicas} replicas" if num_replicas > 1 else ""


def largest(fits: Callable[[int], bool], high: int) -> int:
    """Find the largest n in [1, high] with fits(n), or 0; `fits` must not become true again once false."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def row_bytes(groups: Sequence[KVCacheGroupSpec], limits: BackendLimits, num_buffers: int) -> int:
    """Return the bytes of tokens and block tables of all rows in the worker, and of the tables in its buffers.

    This memory is committed when rows are first used, and then kept.
    """
    tables = sum(group.table_blocks(limits.max_model_len) for group in groups)
    rows = max(limits.max_num_seqs, *limits.traits.padded_rows, 0)
    kept, copied = limits.max_num_seqs * (limits.max_model_len + tables), num_buffers * rows * tables
    return 4 * (kept + copied)


def workspace_bytes(model: ModelSpec, limits: BackendLimits) -> int:
    """Estimate the bytes of activations, logits and processes. Logits exist twice."""
    processes = PROCESS_BYTES + TOKEN_BYTES * model.vocab_size + MAX_MATCHER_BYTES
    return processes + activation_bytes(model, limits.max_num_batched_tokens) + 2 * logits_bytes(model, limits)


def logits_bytes(model: ModelSpec, limits: BackendLimits) -> int:
    """Return the bytes of logits in float32, for tokens that sample or are scored."""
    return 4 * model.vocab_size * min(limits.max_logits, limits.max_num_batched_tokens)


def activation_bytes(model: ModelSpec, step_tokens: int) -> int:
    """Estimate the bytes of activations.

    A layer of width h has about 12 h^2 parameters and keeps about 32 h float32 values per token alive.
    """
    width = int((model.num_parameters / (12 * max(1, model.num_layers))) ** 0.5)
    return 4 * 32 * width * step_tokens


def size_option(num_bytes: int, *, up: bool = False) -> str:
    """Format a size for the option kv-memory, rounded `up` to at least `num_bytes`, or down to at most."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= 100 * factor:
            return f"{-(-num_bytes // factor) if up else num_bytes // factor}{unit}"
    return str(num_bytes)
