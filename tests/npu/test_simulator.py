"""The whole engine on PyPTO's simulator, with our own programs: `make test-npu`, where the runtime is installed.

Programs are compiled once, which takes minutes, so all engines of these tests have the same sizes: seven pages, and
prompts in chunks of at most 64 tokens. Few tokens are generated: a step takes a tenth of a second.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pypto_serving.engine.async_engine import AsyncEngine
from pypto_serving.types.config import EngineConfig, FaultConfig
from pypto_serving.types.request import RequestOutput
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.tier import TIERS
from tests.checkpoints import make_checkpoint
from tests.e2e.engines import Killer, Reply, answers, engine_config, replies, run_engine
from tests.e2e.server import Server
from tests.npu.agreement import agreeing, chips_of
from tests.npu.installed import INSTALLED

pytestmark = [
    pytest.mark.npu,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not INSTALLED, reason="PyPTO's runtime is not installed; docs/npu.md says where to get it"),
]

FAULTS = FaultConfig(respawn_delay_s=0.01, step_timeout_s=60)
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SHARED_MEMORY, LEFT = Path("/dev/shm"), ("psm_*", "simpler_*")
"""Tensors that the runtime shares, and windows of several devices."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), dtype="bfloat16")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled programs are kept for all of these tests, and no longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def config_of(model: Path, **options: Any) -> EngineConfig:
    changes = {"num_blocks": (7,), "faults": FAULTS}
    return engine_config(model, changes, backend="npu", max_num_batched_tokens=64, **options)


def segments(*patterns: str) -> set[Path]:
    return {path for pattern in patterns for path in SHARED_MEMORY.glob(pattern)}


def prompts_of(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(250), k=length) for length in lengths]


PROMPTS = prompts_of(1, (20, 150, 7, 260, 140, 300))


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> list[list[int]]:
    """What each prompt gets by itself."""

    async def one_by_one(engine: AsyncEngine) -> list[list[int]]:
        return [(await answers(engine, [prompt], PARAMS))[0] for prompt in PROMPTS]

    found: list[list[int]] = run_engine(config_of(model, prefix_caching=False), one_by_one)
    assert len({tuple(tokens) for tokens in found}) == len(PROMPTS)
    return found


def test_answers_are_those_of_the_cpu(model: Path, undisturbed: list[list[int]]) -> None:
    """Tokens are equal up to ties, and log-probabilities up to the error of bfloat16."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    expected = run_engine(engine_config(model), lambda engine: replies(engine, PROMPTS, params))
    found = run_engine(config_of(model), lambda engine: replies(engine, PROMPTS, params))
    assert [tokens for tokens, _ in found] == undisturbed
    assert agreeing(found, expected)[1] > 0.5 * sum(map(len, undisturbed))


def test_two_devices_of_one_program(model: Path, tmp_path: Path) -> None:
    """They answer as the CPU does, again from lower tiers, after the end of a chip, and after a restart."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    expected = run_engine(engine_config(model), lambda engine: replies(engine, PROMPTS, params))
    tiers = {"kv_host_memory": "2MiB", "kv_disk": str(tmp_path / "kv")}
    config = config_of(model, tensor_parallel_size=2, **tiers)
    killed: list[psutil.Process] = []

    async def scenario(engine: AsyncEngine) -> list[Reply]:
        def kill_second_chip(_: RequestOutput) -> None:
            if not killed:
                killed.extend(chips_of(engine))
                assert len(killed) == 2
                killed[1].kill()

        first, second = [await replies(engine, PROMPTS, params) for _ in range(2)]
        third = await answers(engine, PROMPTS, params, kill_second_chip)
        assert engine.stats.num_respawns == 1 and not psutil.wait_procs(killed, timeout=10)[1]
        assert [tokens for tokens, _ in first] == [tokens for tokens, _ in second] == third
        return first

    found: list[Reply] = run_engine(config, scenario)
    assert agreeing(found, expected)[1] > 0.5 * sum(len(tokens) for tokens, _ in found)
    assert run_engine(config, lambda engine: answers(engine, PROMPTS, PARAMS)) == [tokens for tokens, _ in found]


def test_batches_hits_preemption_and_tiers_change_nothing(
    model: Path, undisturbed: list[list[int]], tmp_path: Path
) -> None:
    """All at once on six pages, three times: preempted, from the cache, from host memory; then from disk."""
    cached = dict.fromkeys(TIERS, 0)

    def count(output: RequestOutput) -> None:
        if output.finish_reason is not None:
            for tier, tokens in zip(TIERS, output.cached_by_tier, strict=True):
                cached[tier] += tokens

    async def scenario(engine: AsyncEngine) -> list[list[list[int]]]:
        found = [await answers(engine, PROMPTS, PARAMS, count) for _ in range(3)]
        assert engine.stats.max_step_rows > 1
        return found

    config = config_of(model, kv_host_memory="2MiB", kv_disk=str(tmp_path / "kv"))
    assert run_engine(config, scenario) == [undisturbed] * 3
    assert cached["host"] > 0
    assert run_engine(config, lambda engine: answers(engine, PROMPTS, PARAMS, count)) == undisturbed
    assert cached["disk"] > 0


def test_a_kill_of_the_worker_changes_nothing(model: Path, undisturbed: list[list[int]]) -> None:
    async def scenario(engine: AsyncEngine) -> list[list[int]]:
        killer = Killer(engine, 1, seed=1)
        found = await answers(engine, PROMPTS, PARAMS, killer)
        assert engine.stats.num_respawns == killer.killed == 1
        return found

    assert run_engine(config_of(model), scenario) == undisturbed


def family_of(engine: AsyncEngine) -> list[psutil.Process]:
    """Return the worker, and what it started."""
    assert engine.ready is not None
    worker = psutil.Process(engine.ready.worker_pid)
    return [worker, *worker.children(recursive=True)]


def test_nothing_of_two_devices_stays(model: Path) -> None:
    """Neither after a kill of the worker in a dispatch, in which devices have windows, nor after a stop."""
    before = segments(*LEFT)
    family: list[psutil.Process] = []

    async def scenario(engine: AsyncEngine) -> list[list[int]]:
        def kill_in_dispatch(_: RequestOutput) -> None:
            if not family:
                family.extend(family_of(engine))
                while not segments(f"simpler_{family[0].pid:08x}_*"):
                    assert family[0].is_running()
                family[0].kill()

        found = await answers(engine, PROMPTS, PARAMS, kill_in_dispatch)
        assert engine.stats.num_respawns == 1
        assert not psutil.wait_procs(family, timeout=10)[1]
        assert not segments(f"simpler_{family[0].pid:08x}_*")
        family[:] = family_of(engine)
        assert await answers(engine, PROMPTS, PARAMS) == found
        return found

    run_engine(config_of(model, tensor_parallel_size=2), scenario)
    assert not psutil.wait_procs(family, timeout=10)[1]
    assert segments(*LEFT) == before


def kill(chip: psutil.Process) -> None:
    chip.kill()


def stop(chip: psutil.Process) -> None:
    chip.send_signal(signal.SIGSTOP)


def starve(chip: psutil.Process) -> None:
    """Let its next dispatch fail, for which it would need more memory."""
    chip.rlimit(psutil.RLIMIT_AS, (1, 1))


LOSSES = {
    kill: "a process of the npu backend ended",
    stop: "a step took more than 60 s",
    starve: "it ended (exit code 1)",
}


@pytest.mark.parametrize("harm", LOSSES)
def test_what_goes_wrong_on_a_chip_changes_nothing(
    model: Path,
    undisturbed: list[list[int]],
    harm: Callable[[psutil.Process], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The worker is lost, and nothing of it stays: no process, and no shared memory."""
    before = segments(*LEFT)
    family: list[psutil.Process] = []

    async def scenario(engine: AsyncEngine) -> list[list[int]]:
        def once(output: RequestOutput) -> None:
            if not family:
                family.extend(family_of(engine))
                chips = chips_of(engine)
                assert len(chips) == 1
                harm(chips[0])

        found = await answers(engine, PROMPTS, PARAMS, once)
        assert engine.stats.num_respawns == 1
        return found

    assert run_engine(config_of(model), scenario) == undisturbed
    assert not psutil.wait_procs(family, timeout=10)[1]
    assert segments(*LEFT) == before
    said = capfd.readouterr().err
    assert said.count("is lost: ") == said.count(f"is lost: {LOSSES[harm]}") == 1
    assert ("RuntimeError: LocalMailboxEndpoint::run: child failed" in said) == (harm is starve)


@pytest.mark.parametrize("devices", [(), ("--tp", "2")], ids=["one device", "two devices"])
def test_the_bundled_model_over_http(devices: tuple[str, ...]) -> None:
    """The default model answers a chat as on the CPU; a second start takes the programs that are kept."""
    question = {"messages": [{"role": "user", "content": "What is 7 plus 5?"}], "temperature": 0, "max_tokens": 24}

    def ask(*arguments: str) -> str:
        with Server(*arguments) as server:
            answer = server.http.post("/v1/chat/completions", json=question)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["message"]["content"])

    sizes = ("--max-model-len", "512", "--max-num-batched-tokens", "64", "--kv-memory", "4MiB")
    found = [ask("--device", "npu", *devices, *sizes) for _ in range(2)]
    assert found == [ask()] * 2
    assert "12" in found[0]
