"""Replicas over two hosts, here processes that share nothing but connections: answers as from one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from pypto_serving.backend.ranks.host_connections import CONTROL, connect
from pypto_serving.backend.ranks.serving_host import WAITING, HostListener
from pypto_serving.engine.async_engine import AsyncEngine
from pypto_serving.errors import EXIT_ENGINE, EXIT_USAGE, PyptoError
from pypto_serving.parallel.topology import Topology
from pypto_serving.types.request import RequestOutput, StepStats
from tests.checkpoints import make_checkpoint
from tests.e2e.engines import QUICK_FAULTS, Reply, answers, replies, run_engine
from tests.e2e.hosts import SECRET, HostKiller, JoiningHost, Nameserver, Network, joining
from tests.e2e.ranks import (
    MAX_TOKENS,
    MTP,
    NGRAM,
    TIGHT,
    answered,
    assert_ended,
    hits,
    make_drafting_checkpoint,
    rank_config,
    stop,
    streams,
)
from tests.e2e.wires import Damage, wires
from tests.needs import needs_kernels
from tests.store.pool import free_port
from tests.strangers import strangers

pytestmark = [pytest.mark.e2e, needs_kernels]

QUICK: dict[str, Any] = {"faults": QUICK_FAULTS}
KILLS_THE_OTHER_HOST = 9
"""Seed of a HostKiller that soon kills the first process there."""
MARGIN_S, AGAIN_S = 20.0, 30.0
TWO, STAGES = Topology(tensor=2), Topology(pipeline=2)


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYPTO_JOIN_SECRET", SECRET)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hosts") / "model", dtype="bfloat16")


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[Reply]:
    """What one rank answers; its blocks are then on disk, beside the model."""
    return answered(model, rank_config(model, Topology(), kv_disk=str(model.parent / "kv")))[0][1]


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.mark.parametrize(
    "topology", [pytest.param(TWO, id="tp"), pytest.param(STAGES, marks=pytest.mark.soak, id="pp")]
)
def test_hosts_answer_as_one_does(model: Path, wanted: list[Reply], topology: Topology, address: str) -> None:
    """In chunks, preempted, and from all tiers; blocks on disk are those of any number of hosts."""
    tiers = TIGHT | {"kv_disk": str(model.parent / "kv"), "kv_host_memory": "8MiB"}
    with joining(address, model) as host:
        found, stats = answered(model, rank_config(model, topology, join_address=address, **tiers), seeds=(1, 2, 1))
        assert host.joined()["address"] == address
    assert found[1] == wanted
    assert stats.num_preemptions > 0 and stats.prefix_hits > 0 and stats.num_respawns == 0
    assert hits(stats, "host") > 0 and hits(stats, "disk") > 0
    again, stats = answered(model, rank_config(model, Topology(), **tiers), seeds=(2,))
    assert again[2] == found[2]
    assert hits(stats, "disk") > 0


@pytest.fixture(scope="module")
def drafting_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_drafting_checkpoint(tmp_path_factory.mktemp("drafting") / "model")


@pytest.fixture(scope="module")
def undrafted(drafting_model: Path) -> list[Reply]:
    return answered(drafting_model, rank_config(drafting_model, Topology()))[0][1]


@pytest.mark.parametrize(
    ("topology", "drafting"),
    [
        pytest.param(TWO, MTP, marks=pytest.mark.soak, id="tp mtp"),
        pytest.param(STAGES, MTP, id="pp mtp"),
        pytest.param(TWO, NGRAM, marks=pytest.mark.soak, id="tp ngram"),
        pytest.param(STAGES, NGRAM, marks=pytest.mark.soak, id="pp ngram"),
    ],
)
def test_hosts_draft(
    drafting_model: Path, undrafted: list[Reply], topology: Topology, drafting: dict[str, Any], address: str
) -> None:
    """The other host's first process dies on the way; drafts are accepted and rejected.

    The draft layer is in the other host's stage, or half of it is there.
    """
    with joining(address, drafting_model) as host:

        async def scenario(engine: AsyncEngine) -> tuple[list[Reply], StepStats]:
            killer = HostKiller(engine, 1, seed=KILLS_THE_OTHER_HOST, host=host)
            found = await replies(engine, *streams(drafting_model, 1, MAX_TOKENS), killer)
            assert killer.killed_ranks == [1]
            return found, engine.stats

        found, stats = run_engine(
            rank_config(drafting_model, topology, QUICK, join_address=address, max_num_seqs=2, **drafting), scenario
        )
    assert found == undrafted and stats.num_respawns == 1
    assert 0 < sum(stats.accepted_at) < stats.num_drafts


@pytest.mark.soak  # test_hosts_draft kills a process of the other host, test_ranks.py any rank
@pytest.mark.parametrize("topology", [pytest.param(TWO, marks=pytest.mark.soak), STAGES], ids=["tp", "pp"])
def test_streams_survive_the_death_of_any_process_of_both_hosts(
    model: Path, wanted: list[Reply], topology: Topology, address: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The log says which one died."""
    with joining(address, model) as host:

        async def scenario(engine: AsyncEngine) -> list[Reply]:
            killer = HostKiller(engine, 4, seed=4, host=host)
            found = await replies(engine, *streams(model, 1, MAX_TOKENS), killer)
            assert engine.stats.num_respawns == killer.killed == 4
            assert set(killer.killed_ranks) == {0, 1, 2}
            assert_ended([process for process in killer.seen if process not in host.children()])
            causes = re.findall(r"worker \d+ is lost: (.*); starting another", capfd.readouterr().err)
            for rank, cause in zip(killer.killed_ranks, causes, strict=True):
                assert cause.endswith(CAUSES[rank])
            return found

        assert run_engine(rank_config(model, topology, QUICK, join_address=address), scenario) == wanted


CAUSES = ("it ended (exit code -9)", "closed the connection", ": rank 1 ended (exit code -9)")
"""What the core says when the leader, the other host's first process, or its rank is killed."""


def test_a_host_that_hangs_is_left(model: Path, wanted: list[Reply], address: str) -> None:
    """Its processes end once they run again, and it joins the next life."""
    faults = msgspec.structs.replace(QUICK_FAULTS, heartbeat_s=0.2)
    with joining(address, model) as host:

        async def scenario(engine: AsyncEngine) -> list[Reply]:
            hung = host.children()

            def resume() -> None:
                while engine.stats.num_respawns == 0:
                    time.sleep(0.01)
                for process in hung:
                    with contextlib.suppress(psutil.NoSuchProcess):  # it ends with its group
                        process.resume()

            resuming = threading.Thread(target=resume, daemon=True)

            def hang(output: RequestOutput) -> None:
                if resuming.ident is None:
                    for process in hung:
                        stop(process)
                    resuming.start()

            found = await replies(engine, *streams(model, 1, MAX_TOKENS), hang)
            assert engine.stats.num_respawns == 1
            assert_ended(hung)
            return found

        assert run_engine(rank_config(model, TWO, {"faults": faults}, join_address=address), scenario) == wanted


def test_another_core_waits_for_an_address_that_is_taken(model: Path, address: str) -> None:
    told: list[str] = []

    async def scenario() -> None:
        config = rank_config(model, TWO, QUICK, join_address=address)
        engine = AsyncEngine(config, lambda phase, *_: told.append(phase))
        await engine.start()
        try:
            with joining(address, model):
                await engine.wait_ready()
                name, _, port = address.rpartition(":")
                with socket.create_server((name, int(port))):
                    told.clear()
                    assert engine._child is not None
                    os.kill(engine._child.pid, signal.SIGKILL)
                    while not any(phase.startswith(WAITING) for phase in told):
                        assert engine.health().status != "dead"
                        await asyncio.sleep(0.01)
                await engine.wait_ready()
                assert await answers(engine, [[5, 6, 7]])
        finally:
            await engine.stop()

    asyncio.run(scenario())


def test_a_host_joins_past_hosts_that_are_refused_and_strangers(model: Path, tmp_path: Path, address: str) -> None:
    """Those with another model or without the secret are told; one who knows the secret may say what is no message."""
    other = make_checkpoint(tmp_path / "model", dtype="bfloat16", vocab_size=300)

    async def scenario(refused: dict[str, JoiningHost]) -> None:
        engine = AsyncEngine(rank_config(model, TWO, QUICK, join_address=address))
        await engine.start()
        try:
            for words, stranger in refused.items():
                code, errors = await asyncio.to_thread(stranger.wait)
                assert code == EXIT_USAGE and words in errors
            await assert_sent_away(address, b"\xff" * 64)
            with strangers(address, "silent", 50), joining(address, model):
                await engine.wait_ready()
                assert await answers(engine, [[5, 6, 7]])
            assert engine.stats.num_respawns == 0
        finally:
            await engine.stop()

    with joining(address, other) as first, joining(address, model, secret="a secret of others") as second:
        differ = f"the serving host serves another model: config.json and 1 other file of {model} there differ; give"
        asyncio.run(scenario({differ: first, "the secrets differ; give both hosts the same": second}))


@pytest.mark.soak
@pytest.mark.parametrize("said", [b"\x01\0\0\0\xc1", b"\x01\0\0\0\x80"], ids=["noise", "empty"])
@pytest.mark.parametrize("kind", ["lengths", "noise", "half"])
def test_a_host_joins_past_other_strangers(model: Path, address: str, kind: str, said: bytes) -> None:
    async def scenario() -> None:
        engine = AsyncEngine(rank_config(model, TWO, QUICK, join_address=address))
        await engine.start()
        try:
            await assert_sent_away(address, said)
            with strangers(address, kind, 200), joining(address, model):
                await engine.wait_ready()
            assert engine.stats.num_respawns == 0
        finally:
            await engine.stop()

    asyncio.run(scenario())


async def assert_sent_away(address: str, said: bytes) -> None:
    with await asyncio.to_thread(patiently_connected, address) as end:
        end.sendall(said)
        assert await asyncio.to_thread(end.recv, 1) == b""


def test_a_host_that_was_sent_away_comes_again(model: Path, address: str) -> None:
    listener = HostListener(address, SECRET.encode())
    with joining(address, model), contextlib.closing(listener):
        arrivals = iter(listener.arrivals(time.monotonic() + AGAIN_S, lambda *_: None))
        for _ in range(3):
            next(arrivals).end.close()


def patiently_connected(address: str) -> socket.socket:
    deadline_s = time.monotonic() + AGAIN_S
    while True:
        try:
            return connect(address, SECRET.encode(), CONTROL)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline_s


def test_no_host_joins(model: Path, address: str) -> None:
    faults = msgspec.structs.replace(QUICK_FAULTS, heartbeat_s=0.3, step_timeout_s=8.0)

    async def scenario() -> None:
        engine = AsyncEngine(rank_config(model, TWO, {"faults": faults}, join_address=address))
        await engine.start()
        try:
            with pytest.raises(PyptoError) as caught:
                await engine.wait_ready()
            words = f"no host joined at {address} within 5 s; run `pypto-serving join {address}` there"
            assert str(caught.value) == words
            assert caught.value.exit_code == EXIT_ENGINE
        finally:
            await engine.stop()

    asyncio.run(scenario())


def test_a_host_tries_again_where_nobody_greets_it(model: Path, address: str) -> None:
    """As by a serving host whose machine is too busy."""
    name, _, port = address.rpartition(":")
    with socket.create_server((name, int(port))) as listener, joining(address, model) as host:
        listener.settimeout(AGAIN_S)
        for _ in range(2):
            end, _ = listener.accept()
            with end:
                end.settimeout(AGAIN_S)
                assert end.recv(1) == b""
        _, errors = host.end()
    assert f"joining {address} with the model in {model}" in errors


DAMAGES: dict[str, Damage] = {
    "noise": lambda data: os.urandom(len(data)),
    "lengths": lambda data: b"\xff" * 64 + data,
    "gap": lambda data: data[4:],
    "lost": lambda data: b"",
}
DAMAGED = [
    (TWO, "control serving", "noise", "lengths gap"),
    (TWO, "control joining", "", "lengths noise gap"),
    (TWO, "exchange serving", "", "gap noise lengths"),
    (TWO, "steps joining", "", "noise lengths gap"),
    (TWO, "blocks serving", "", "lengths noise"),
    (TWO, "blocks joining", "", "noise lengths"),
    (STAGES, "steps joining", "", "lost"),
    (STAGES, "rows joining", "gap", "noise lengths"),
    (STAGES, "logits serving", "", "lost noise lengths gap"),
]
"""Where bytes are damaged, how if not only in the soak, and how else there."""


@pytest.mark.parametrize(
    ("topology", "where", "damage"),
    [(topology, where, damage) for topology, where, damage, _ in DAMAGED if damage]
    + [
        pytest.param(topology, where, damage, marks=pytest.mark.soak)
        for topology, where, _, others in DAMAGED
        for damage in others.split()
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "tp" if value == TWO else "pp",
)
def test_damaged_bytes_end_the_group(
    model: Path,
    wanted: list[Reply],
    address: str,
    capfd: pytest.CaptureFixture[str],
    topology: Topology,
    where: str,
    damage: str,
) -> None:
    """On both sides, within the time of a step and without a traceback; both begin anew."""
    faults = msgspec.structs.replace(QUICK_FAULTS, heartbeat_s=0.3, step_timeout_s=8.0)
    with wires(address, *where.split(), DAMAGES[damage]) as wire, joining(wire.address, model) as host:

        async def scenario(engine: AsyncEngine) -> list[Reply]:
            def hurt(output: RequestOutput) -> None:
                wire.break_it()

            while engine.stats.num_respawns == 0:  # beats are few
                found = await replies(engine, *streams(model, 1, MAX_TOKENS), hurt)
            assert wire.broken.is_set() and engine.stats.num_respawns == 1
            return found

        tiers = TIGHT | {"kv_host_memory": "8MiB"}
        assert (
            run_engine(rank_config(model, topology, {"faults": faults}, join_address=address, **tiers), scenario)
            == wanted
        )
        _, errors = host.end()
    assert "Traceback" not in errors + capfd.readouterr().err


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        network = Network()
    except OSError as error:
        pytest.skip(str(error))
    yield network
    network.remove()


def test_a_host_joins_by_name_once_names_are_known(model: Path, network: Network, tmp_path: Path) -> None:
    """A cut network takes the nameserver with it, so that what it says then is not final."""
    port, names = free_port(), Nameserver(network.ours, failures=6)
    within = (*network.within, *names.within, names.write(tmp_path / "resolv.conf"))

    async def scenario() -> None:
        engine = AsyncEngine(rank_config(model, TWO, QUICK, join_address=f"{network.ours}:{port}"))
        await engine.start()
        try:
            with joining(f"serving-host.test:{port}", model, within):
                await engine.wait_ready()
                assert await answers(engine, [[5, 6, 7]])
        finally:
            await engine.stop()

    with contextlib.closing(names):
        asyncio.run(scenario())
    assert names.failures == 0


class Cuts:
    """Cuts the cable while streams run, once, and mends it after `seconds`."""

    def __init__(self, network: Network, seconds: float) -> None:
        self._network, self._begun = network, False
        self._mend = threading.Timer(seconds, network.mend)

    def __call__(self, output: RequestOutput) -> None:
        if not self._begun:
            self._begun = True
            self._network.cut()
            self._mend.start()

    def end(self) -> None:
        self._mend.join()


@pytest.mark.parametrize(
    ("topology", "seconds", "respawns"),
    [
        pytest.param(TWO, 1.0, 0, id="tp-short"),
        pytest.param(STAGES, 8.0, 1, id="pp-long"),
        pytest.param(STAGES, 1.0, 0, marks=pytest.mark.soak, id="pp-short"),
        pytest.param(TWO, 8.0, 1, marks=pytest.mark.soak, id="tp-long"),
    ],
)
def test_streams_survive_a_cut_cable(
    model: Path, wanted: list[Reply], topology: Topology, network: Network, seconds: float, respawns: int
) -> None:
    """A short cut delays a step. After a long one, the group begins anew."""
    address = f"{network.ours}:{free_port()}"
    faults = msgspec.structs.replace(QUICK_FAULTS, heartbeat_s=0.4)
    with joining(address, model, network.within):

        async def scenario(engine: AsyncEngine) -> list[Reply]:
            cuts = Cuts(network, seconds)
            found = await replies(engine, *streams(model, 1, MAX_TOKENS), cuts)
            cuts.end()
            assert engine.stats.num_respawns == respawns
            return found

        assert run_engine(rank_config(model, topology, {"faults": faults}, join_address=address), scenario) == wanted


def test_a_cable_that_stays_cut_ends_the_requests(model: Path, network: Network) -> None:
    address = f"{network.ours}:{free_port()}"
    faults = msgspec.structs.replace(QUICK_FAULTS, heartbeat_s=0.2, step_timeout_s=8.0)
    with joining(address, model, network.within):

        async def scenario(engine: AsyncEngine) -> None:
            began_s = time.monotonic()
            with pytest.raises(AssertionError, match=f"engine_dead.*no host joined at {address}"):
                await replies(engine, *streams(model, 1, MAX_TOKENS), lambda output: network.cut())
            assert time.monotonic() - began_s < faults.step_timeout_s + MARGIN_S

        run_engine(rank_config(model, TWO, {"faults": faults}, join_address=address), scenario)
