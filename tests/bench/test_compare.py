"""The comparison's arithmetic on what was recorded: loads, ratios, goals, tables. No peer is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import compare_machine as machine
import compare_report as report
import pytest
from compare import BY_NAME
from compare_install import folder_bytes
from compare_latency import overlapping_gaps_s
from compare_machine import Load, Sample, Stat
from compare_report import ITL, OUTPUT, P99, PROMPT, Goal, Metric
from workloads import WORKLOADS

from pypto_serving.bench.metrics import RequestRecord

STAT = "42 (a) (b) S {parent} 42 {session} 0 -1 0 0 0 0 0 {user} {system} {dead_user} {dead_system} 20 0 1"


def stat(pid: int, parent: int, session: int) -> Stat:
    return Stat(pid, parent, session, 0.0)


def run(side: str, number: int, value: float, foreign: float = 0.0, **changes: Any) -> dict[str, Any]:
    load = {"server": 0.9, "client": 0.05, "foreign": foreign, "stolen": 0.01, "seconds": 4.0}
    figures = {
        "output_throughput": value,
        "total_token_throughput": 3 * value,
        "median_itl_ms": 1000 / value,
        "client_cpu_share": 0.05,
    }
    place = {"round": number, "workload": "W1", "side": side, "attempt": 0}
    return {**place, **figures, "load": load, "read_before": 33e9, "read_after": 55e9, **changes}


def record(*runs: dict[str, Any], peer: str = "vllm") -> dict[str, Any]:
    def system(name: str, without_kv: int) -> dict[str, Any]:
        facts = {"bytes": 1 << 30, "versions": {name: "1"}}
        memory = [{"peak": 4 << 30, "resident": 3 << 30, "without_kv": without_kv << 30}]
        return {"title": f"the {name}", "facts": facts, "flags": "-x", "ready_s": [3.0, 5.0, 4.0], "memory": memory}

    about = {"date": "2026-01-02", "cpu": "CPU", "cpus": 2, "commit": "abc"}
    systems = {"ours": system("ours", 1), peer: system(peer, 2) | {"agreement": "7 of 8"}}
    return {"pairs": {peer: {"about": about, "systems": systems, "runs": list(runs)}}}


def test_a_process_is_read_whatever_its_name() -> None:
    ticks = round(1 / machine.TICK_S)
    line = STAT.format(parent=7, session=9, user=ticks, system=2 * ticks, dead_user=3 * ticks, dead_system=4 * ticks)
    assert Stat.parse(line) == Stat(42, 7, 9, pytest.approx(10))


def test_times_of_the_machine() -> None:
    ticks = round(1 / machine.TICK_S)
    line = " ".join(str(value * ticks) for value in (1, 2, 3, 40, 50, 4, 5, 6, 7, 8))
    assert machine.machine_times(f"cpu  {line}\ncpu0 0 0\n") == (pytest.approx(15), pytest.approx(6))


def test_a_tree_keeps_those_that_left_their_parent() -> None:
    stats = [stat(1, 0, 1), stat(5, 1, 5), stat(6, 5, 5), stat(7, 6, 7), stat(8, 1, 5), stat(9, 1, 9)]
    assert {one.pid for one in machine.descendants(5, stats)} == {5, 6, 7, 8}
    assert machine.generations(5, stats) == [[5], [6, 8], [7]]


def test_foreign_load_is_what_is_left() -> None:
    before, after = Sample(10, 100, 7, 50, 20, 1), Sample(14, 107, 7.8, 54, 21, 1.2)
    load = Load.between(before, after, cpus=2)
    assert (load.server, load.client, load.stolen) == pytest.approx((4 / 8, 1 / 8, 0.8 / 8))
    assert load.foreign == pytest.approx((7 - 4 - 1 - 0.2) / 8)
    assert load.seconds == 4
    assert Load.between(before, Sample(14, 100, 7, 54, 20, 1)).foreign == 0


def test_own_load_is_not_foreign() -> None:
    """A real child burns CPU time in a tree of its own."""
    busy = "print(flush=True); input(); sum(range(3_000_000)); print(flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", busy], stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdin and child.stdout
        child.stdout.readline()
        before = machine.sample(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        after = machine.sample(child.pid)
        assert after.server_s > before.server_s
        assert after.machine_s - before.machine_s >= after.server_s - before.server_s - 2 * machine.TICK_S
        assert machine.memory(child.pid).peak >= machine.memory(child.pid).resident > 0
        child.stdin.write("\n")
        child.stdin.close()


def test_tokens_of_a_workload_count_what_is_shared_once() -> None:
    assert BY_NAME["W1"].tokens == 3 * 256
    assert BY_NAME["W5"].tokens == 1024 + 17 * 96


def test_the_calmest_attempt_counts() -> None:
    noisy = [run("ours", 0, 1, 0.3), run("ours", 0, 2, 0.2), run("ours", 0, 3, 0.25)]
    calm = [run("ours", 1, 4, 0.06), run("ours", 1, 5, 0.04), run("ours", 2, 6, 0.05), run("ours", 2, 7, 0.0)]
    assert [one["output_throughput"] for one in report.kept(noisy + calm)] == [2, 5, 6]


def test_ratio_of_medians_with_the_span_of_the_rounds() -> None:
    runs = [run("ours", i, value) for i, value in enumerate((30, 33, 48))]
    runs += [run("vllm", i, value) for i, value in enumerate((30, 30, 32))]
    found = report.ratio(runs, OUTPUT, "ours", "vllm")
    assert found == report.Ratio(33, 30, pytest.approx(1.1), pytest.approx(1.0), pytest.approx(1.5))
    assert report.ratio(runs, PROMPT, "ours", "vllm") == report.Ratio(66, 60, pytest.approx(1.1), 1.0, 1.5)
    assert report.ratio(runs, P99, "ours", "vllm") is None
    assert report.ratio(runs[:3], OUTPUT, "ours", "vllm") is None


@pytest.mark.parametrize(
    ("metric", "ratio", "met"), [(OUTPUT, 1.3, True), (OUTPUT, 1.29, False), (ITL, 1.3, True), (ITL, 1.31, False)]
)
def test_goals(metric: Metric, ratio: float, met: bool) -> None:
    assert Goal("W2", metric, "vllm", 1.3).met(ratio) is met


def test_every_goal_has_a_row() -> None:
    for goal in report.GOALS:
        assert goal.metric in report.SHOWN[goal.workload]
    assert {workload.name for workload in WORKLOADS} < report.SHOWN.keys()


def test_tables() -> None:
    made = record(run("ours", 0, 30), run("vllm", 0, 40), run("ours", 1, 30), run("vllm", 1, 20))
    rows = report.result_table(made, "vllm")
    assert rows[0][2:4] == ["the ours", "the vllm"]
    assert rows[1] == ["W1", "output tok/s", "30.0", "30.0", "1.00 (0.75 to 1.50)", "at least 1", "yes"]
    systems = report.system_table(made)
    assert systems[2] == ["the vllm", "vllm 1", "4.0", "1.00", "4.00", "3.00", "2.00", "5% of a CPU"]
    assert "0.50 (at most 0.5: met)" in str(report.memory_line(made))
    text = report.markdown(made, "compare.svg")
    assert "in 7 of 8 prompts" in text and "33 to 55 GB/s" in text and "compare.svg" in text


def test_int8_is_compared_with_our_own() -> None:
    made = record(run("ours", 0, 30), run("int8", 0, 48), peer="int8")
    assert report.result_table(made, "int8")[1][2:] == ["48.0", "30.0", "1.60 (1.60 to 1.60)", "at least 1.7", "**no**"]
    assert report.memory_line(made) is None


def test_share_of_the_bandwidth_at_4_bits() -> None:
    made = record(run("ours", 0, 40), run("ours", 1, 50), run("llama-q4", 0, 30), peer="llama-q4")
    assert list(report.shares(made)) == []
    made["pairs"]["llama-q4"]["systems"]["ours"]["token_bytes"] = 880_000_000
    (line,) = report.shares(made)
    assert "0.880 GB" in line and "0.90 (0.80 to 1.00), at least 0.85: met" in line
    assert line in report.markdown(made, "x.svg")


def test_systems_of_several_pairs_are_listed_once() -> None:
    made = record(run("ours", 0, 30), run("vllm", 0, 40))
    other = record(run("ours", 0, 50), run("llama-q4", 0, 40), peer="llama-q4")["pairs"]["llama-q4"]
    made["pairs"] |= {"again": made["pairs"]["vllm"], "llama-q4": other}
    other["systems"]["ours"]["title"] = "4 bits"
    titles = [row[0] for row in report.system_table(made)[1:]]
    assert titles == ["the ours", "the vllm", "4 bits", "the llama-q4"]


def test_repeated_and_noisy_runs_are_told() -> None:
    made = record(run("ours", 0, 30, 0.2), run("ours", 0, 30, 0.1), run("vllm", 0, 30))
    assert "2 runs, 1 repeated for load, 1 of those kept above 5%" in "\n".join(report.notes(made))


def test_a_record_survives_a_file_and_makes_a_picture(tmp_path: Path) -> None:
    made = record(run("ours", 0, 30), run("vllm", 0, 40), run("ours", 0, 9, workload="P99", p99_itl_ms=5.0))
    again = json.loads(json.dumps(made))
    assert report.markdown(again, "x.svg") == report.markdown(made, "x.svg")
    assert report.plot(tmp_path / "x.svg", again)
    assert (tmp_path / "x.svg").stat().st_size > 1000


def test_the_section_is_replaced_and_nothing_else() -> None:
    document = f"# Head\n{report.BEGIN}\nold\n{report.END}\ntail\n"
    assert report.insert(document, "new\n") == f"# Head\n{report.BEGIN}\nnew\n{report.END}\ntail\n"
    with pytest.raises(ValueError, match="there is no"):
        report.insert("# Head\n", "new\n")


def test_gaps_that_overlap_the_long_prompt() -> None:
    record = RequestRecord(start_s=1.0, ttft_s=1.0, itls_s=[1.0, 3.0, 1.0, 1.0])
    assert overlapping_gaps_s(record, 3.5, 6.5) == pytest.approx([3.0, 1.0])
    assert overlapping_gaps_s(record, 9.0, 9.5) == []


def test_bytes_of_a_folder_do_not_count_what_links_point_to(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_bytes(b"x" * 9000)
    before = folder_bytes(tmp_path)
    (tmp_path / "link").symlink_to("/proc/self/exe")
    assert 9000 <= before <= folder_bytes(tmp_path) <= before + 4096
