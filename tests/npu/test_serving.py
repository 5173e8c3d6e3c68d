"""The whole engine over the double of the runtime: chunks, prefix hits, preemption, tiers, faults.

Answers equal those of the CPU's program up to near-ties, and those of an undisturbed engine token by token.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pypto_serving.engine.async_engine import AsyncEngine
from pypto_serving.setup import host
from pypto_serving.types.config import EngineConfig, FaultConfig
from pypto_serving.types.request import RequestOutput
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.tier import TIERS
from tests.checkpoints import make_checkpoint
from tests.e2e.engines import GREEDY, QUICK_FAULTS, Killer, Reply, answers, engine_config, replies, run_engine
from tests.e2e.ranks import loading_blocks
from tests.e2e.server import Server
from tests.npu.agreement import agreeing, chips_of
from tests.npu.installed import EACH_REVISION, with_double

pytestmark = pytest.mark.e2e

PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
FEW = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
NEVER_S = 200.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), dtype="bfloat16")


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes find the double; those that forked it leave nothing behind."""
    find = host.importlib.util.find_spec
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: name == "pypto" or find(name))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "npu-cache"))
    for name, value in with_double().items():
        monkeypatch.setenv(name, value)
    mark = uuid.uuid4().hex
    monkeypatch.setenv("PYPTO_TEST_MARK", mark)
    yield
    _, alive = psutil.wait_procs([process for process in psutil.process_iter() if _has(process, mark)], timeout=5)
    assert not alive, f"left behind: {alive}"


def _has(process: psutil.Process, mark: str) -> bool:
    """Whether a process, or the one that it was forked from, was started with this mark."""
    try:
        return process.environ().get("PYPTO_TEST_MARK") == mark
    except psutil.Error:
        return False


@functools.cache
def undisturbed(model: Path) -> list[list[int]]:
    return run_engine(npu_config(model), lambda engine: answers(engine, disturbed_prompts(), PARAMS))


def disturbed_prompts() -> list[list[int]]:
    """Four prompts whose outputs begin a page, of which two run at once where pages are few, and two short ones."""
    return [prompt + [7] * (250 - len(prompt)) for prompt in prompts_of(6, 4)] + prompts_of(5, 2, 120)


def npu_config(model: Path, changes: dict[str, Any] | None = None, **options: Any) -> EngineConfig:
    return engine_config(model, changes, **{"backend": "npu", **options})


def prompts_of(seed: int, count: int, longest: int = 180) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(250), k=rng.randrange(2, longest)) for _ in range(count)]


@pytest.mark.parametrize("revision", EACH_REVISION)
def test_answers_are_those_of_the_cpu(model: Path, revision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty requests, more than there are rows, in chunks of at most 96 tokens beside decodes."""
    for name, value in with_double(revision, revision).items():
        monkeypatch.setenv(name, value)
    prompts = prompts_of(1, 20)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    expected = run_engine(engine_config(model), lambda engine: replies(engine, prompts, params))
    config = npu_config(model, max_num_batched_tokens=96)
    found = run_engine(config, lambda engine: replies(engine, prompts, params))
    assert agreeing(found, expected)[0] >= 12
    assert len({tuple(tokens) for tokens, _ in found}) == len(prompts)


def test_two_devices_of_one_program(model: Path, tmp_path: Path) -> None:
    """They answer as the CPU does, in chunks, from lower tiers, after the end of a chip, and after a restart."""
    prompts = prompts_of(9, 5, 300)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    expected = run_engine(engine_config(model), lambda engine: replies(engine, prompts, params))
    cached, tiers = dict.fromkeys(TIERS, 0), {"kv_host_memory": "2MiB", "kv_disk": str(tmp_path / "kv")}
    changes = {"num_blocks": (6,), "faults": QUICK_FAULTS}
    config = loading_blocks(npu_config(model, changes, tensor_parallel_size=2, max_num_batched_tokens=96, **tiers))

    def count(output: RequestOutput) -> None:
        if output.finish_reason is not None:
            for tier, tokens in zip(TIERS, output.cached_by_tier, strict=True):
                cached[tier] += tokens

    async def scenario(engine: AsyncEngine) -> list[Reply]:
        first, second = [await replies(engine, prompts, params, count) for _ in range(2)]
        assert cached["host"] and not engine.stats.num_respawns
        killed: list[psutil.Process] = []

        def kill_second_chip(output: RequestOutput) -> None:
            if not killed:
                killed.extend(chips_of(engine))
                assert len(killed) == 2
                killed[1].kill()

        third = await answers(engine, prompts, params, kill_second_chip)
        assert engine.stats.num_respawns == 1 and not psutil.wait_procs(killed, timeout=10)[1]
        assert [tokens for tokens, _ in first] == [tokens for tokens, _ in second] == third
        return first

    found: list[Reply] = run_engine(config, scenario)
    assert agreeing(found, expected)[0] >= 3
    again = run_engine(config, lambda engine: answers(engine, prompts, params, count))
    assert again == [tokens for tokens, _ in found] and cached["disk"]


def test_batch_chunks_and_hits_change_nothing(model: Path) -> None:
    """One request after the other, in whole prompts, answers what all at once do; the second time from the cache."""
    shared = prompts_of(2, 1)[0] + [7] * 160
    prompts = [shared[:n] + tail for n, tail in zip((130, 256, 300, 330), prompts_of(3, 4, 60), strict=True)]
    prompts += prompts_of(4, 6)

    async def one_by_one(engine: AsyncEngine) -> list[list[int]]:
        return [(await answers(engine, [prompt], FEW))[0] for prompt in prompts]

    async def twice(engine: AsyncEngine) -> list[list[list[int]]]:
        both = [await answers(engine, prompts, FEW) for _ in range(2)]
        assert engine.stats.max_step_rows > 8
        return both

    off = npu_config(model, prefix_caching=False, max_num_batched_tokens=512)
    expected = run_engine(off, one_by_one)
    assert run_engine(npu_config(model, max_num_batched_tokens=64), twice) == [expected, expected]


def test_preemption_tiers_and_kills_change_nothing(model: Path, tmp_path: Path) -> None:
    """Five pages for sequences that need up to three each: blocks go to host memory and disk, and workers die."""

    async def scenario(engine: AsyncEngine) -> list[list[list[int]]]:
        first = await answers(engine, disturbed_prompts(), PARAMS)
        assert engine.stats.num_preemptions
        killer = Killer(engine, 1, seed=1)
        second = await answers(engine, disturbed_prompts(), PARAMS, killer)
        assert engine.stats.num_respawns == killer.killed == 1
        return [first, second]

    changes = {"num_blocks": (6,), "faults": QUICK_FAULTS}
    config = npu_config(model, changes, kv_host_memory="2MiB", kv_disk=str(tmp_path / "kv"), max_model_len=512)
    assert run_engine(config, scenario) == [undisturbed(model)] * 2


@pytest.mark.soak
def test_streams_survive_kills_of_the_worker(model: Path) -> None:
    async def scenario(engine: AsyncEngine) -> list[list[int]]:
        killer = Killer(engine, 2, seed=1)
        found = await answers(engine, disturbed_prompts(), PARAMS, killer)
        assert engine.stats.num_respawns == killer.killed == 2
        return found

    assert run_engine(npu_config(model, {"faults": QUICK_FAULTS}), scenario) == undisturbed(model)


@pytest.mark.parametrize(
    "faults",
    [
        ("fail 9", "init 0", "hang 9"),  # one behind the other
        pytest.param(("die 9",), marks=pytest.mark.soak),
    ],
    ids=" ".join,
)
def test_what_goes_wrong_on_a_chip(
    model: Path, faults: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is lost, with the process of its chip, and the streams go on in the next life.

    A chip that ends before it is ready leaves the runtime's preparation waiting for ever.
    """
    expected = undisturbed(model)
    left = tmp_path / "faults"
    left.write_text("\n".join(faults))
    monkeypatch.setenv("PYPTO_DOUBLE_FAULTS", str(left))
    step_timeout_s = 8.0 if "hang 9" in faults else NEVER_S

    async def scenario(engine: AsyncEngine) -> list[list[int]]:
        found = await answers(engine, disturbed_prompts(), PARAMS)
        assert engine.stats.num_respawns == len(faults)
        return found

    began_s = time.monotonic()
    config = npu_config(model, {"faults": FaultConfig(respawn_delay_s=0.01, step_timeout_s=step_timeout_s)})
    assert run_engine(config, scenario) == expected
    assert time.monotonic() - began_s < NEVER_S, "the worker did not notice"
    assert not left.read_text()


def test_the_host_samples_with_seeds(model: Path) -> None:
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=8, ignore_eos=True) for i in range(4)]
    prompts = prompts_of(8, 4)

    async def scenario(engine: AsyncEngine) -> None:
        first = await answers(engine, prompts, params)
        assert first == await answers(engine, prompts, params) != await answers(engine, prompts, GREEDY)

    run_engine(npu_config(model), scenario)


def test_the_bundled_model_over_http() -> None:
    """Chats, and what no program of this backend gives."""
    questions = ["Hello!", "What is 7 plus 5?"]

    def ask(*arguments: str) -> list[str]:
        with Server(*arguments) as server:
            bodies = [{"messages": [{"role": "user", "content": text}], "temperature": 0} for text in questions]
            found = [server.http.post("/v1/chat/completions", json=body | {"max_tokens": 16}) for body in bodies]
            scored = {"prompt": "Hello", "prompt_logprobs": 1, "max_tokens": 1}
            refused = server.http.post("/v1/completions", json=scored)
            assert refused.status_code == (400 if arguments else 200), refused.text
            return [answer.json()["choices"][0]["message"]["content"] for answer in found]

    answers = ask("--device", "npu", "--tp", "2")
    assert answers == ask() and all(answers)


def test_tiers_are_refused_where_only_whole_tensors_are_copied(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYPTO_DOUBLE_REVISION", "2026-08")
    config = npu_config(model, kv_host_memory="2MiB")

    async def start() -> None:
        engine = AsyncEngine(config)
        await engine.start()
        try:
            await engine.wait_ready()
        finally:
            await engine.stop()

    with pytest.raises(Exception, match=r"copies whole tensors only, .* drop kv-host-memory"):
        asyncio.run(start())
