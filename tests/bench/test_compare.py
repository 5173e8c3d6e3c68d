"""The comparison's arithmetic on what was recorded: loads, ratios, goals, tables. No peer is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import compare_report as report
import pytest
import servers
from compare import PAIRS, overlapping_gaps_s
from compare_report import ITL, OUTPUT, P99, PROMPT, Metric
from peers import folder_bytes
from servers import CpuSample, Relation
from workloads import BY_NAME, WORKLOADS, cells, read_files

from pypto_serving.bench.metrics import RequestRecord


def run(side: str, number: int, value: float, foreign: float = 0.0, **changes: Any) -> dict[str, Any]:
    figures = {"output_throughput": value, "total_token_throughput": 3 * value, "median_itl_ms": 1000 / value}
    place = {"round": number, "workload": "W1", "side": side}
    return {**place, **figures, "foreign": foreign, "read_before": 33e9, "read_after": 55e9, **changes}


def record(*runs: dict[str, Any], pair: str = "vllm") -> dict[str, Any]:
    def system(name: str, without_kv: int) -> dict[str, Any]:
        facts = {"bytes": 1 << 30, "versions": {name: "1"}}
        memory = [{"peak": 4 << 30, "resident": 3 << 30, "without_kv": without_kv << 30}]
        costs = {"ready_s": [3.0, 5.0, 4.0], "memory": memory, "token_bytes": 0}
        return {"title": f"the {name}", "facts": facts, "flags": "-x", **costs}

    about = {"date": "2026-01-02", "cpu": "CPU", "cpus": 2, "commit": "abc"}
    systems = {"ours": system("ours", 1), pair: system(pair, 2) | {"agreement": "7 of 8"}}
    return {"pair": pair, "own": pair == "int8", "about": about, "systems": systems, "runs": list(runs)}


def test_a_tree_keeps_those_that_left_their_parent() -> None:
    of = {1: (0, 1), 5: (1, 5), 6: (5, 5), 7: (6, 7), 8: (1, 5), 9: (1, 9)}
    relations = {pid: Relation(*relation) for pid, relation in of.items()}
    assert servers.generations(5, relations) == [[5], [6, 8], [7]]


def test_foreign_load_is_what_is_left() -> None:
    before, after = CpuSample(10, 100, 50, 20, 1), CpuSample(14, 107, 54, 21, 1.2)
    assert before.foreign_share(after, cpus=2) == pytest.approx((7 - 4 - 1 - 0.2) / 8)
    assert before.foreign_share(CpuSample(14, 100, 54, 20, 1)) == 0


def test_own_load_is_not_foreign() -> None:
    """A real child burns CPU time in a tree of its own."""
    busy = "print(flush=True); input(); sum(range(3_000_000)); print(flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", busy], stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdin and child.stdout
        child.stdout.readline()
        before = CpuSample.take(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        after = CpuSample.take(child.pid)
        assert after.server_s > before.server_s
        assert after.machine_s - before.machine_s >= after.server_s - before.server_s - 0.02
        peak, resident = servers.memory_bytes(child.pid)
        assert peak >= resident > 0
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
    assert found is not None and found.value == pytest.approx(1.1)
    assert (found.first, found.second, sorted(found.rounds)) == (33, 30, pytest.approx([1.0, 1.1, 1.5]))
    assert report.ratio(runs, PROMPT, "ours", "vllm") == report.Ratio(66, 60, found.rounds)
    assert report.ratio(runs, P99, "ours", "vllm") is None
    assert report.ratio(runs[:3], OUTPUT, "ours", "vllm") is None


@pytest.mark.parametrize(
    ("metric", "ratio", "met"),
    [(OUTPUT, 1.3, "yes"), (OUTPUT, 1.29, "**no**"), (ITL, 0.7, "yes"), (ITL, 0.71, "**no**"), (P99, 1.0, "")],
)
def test_goals(metric: Metric, ratio: float, met: str) -> None:
    assert report.goal_cells("vllm", "W2", metric, ratio)[1] == met


def test_every_goal_has_a_row() -> None:
    for pair, goals in report.GOALS.items():
        for workload, metric in goals:
            assert metric in report.SHOWN[workload] and workload in PAIRS[pair].workloads
    assert {workload.name for workload in WORKLOADS} < report.SHOWN.keys()


def test_tables() -> None:
    made = record(run("ours", 0, 30), run("vllm", 0, 40), run("ours", 1, 30), run("vllm", 1, 20))
    rows = report.result_table(made)
    assert rows[0][2:4] == ["the ours", "the vllm"]
    assert rows[1] == ["W1", "output tok/s", "30.0", "30.0", "1.00 (0.75 to 1.50)", "at least 1", "yes"]
    systems = {row[0]: row for row in report.system_table([made])}
    assert systems["the vllm"] == ["the vllm", "vllm 1", "4.0", "1.00", "4.00", "3.00", "2.00"]
    assert "0.50 (at most 0.5: met)" in report.memory_line(made)
    text = report.markdown([made])
    assert "in 7 of 8 prompts" in text and "44 (33 to 55) GB/s" in text and "at most 0.5: met" in text


def test_int8_is_compared_with_our_own() -> None:
    made = record(run("ours", 0, 30), run("int8", 0, 48), pair="int8")
    assert report.result_table(made)[1][2:] == ["48.0", "30.0", "1.60 (1.60 to 1.60)", "at least 1.7", "**no**"]
    assert "Resident memory" not in report.markdown([made])


def test_share_of_the_bandwidth_at_4_bits() -> None:
    made = record(run("ours", 0, 40), run("ours", 1, 50), run("llama-q4", 0, 30), pair="llama-q4")
    assert list(report.shares(made)) == []
    made["systems"]["ours"]["token_bytes"] = 880_000_000
    (line,) = report.shares(made)
    assert "0.880 GB" in line and "0.90 (0.80 to 1.00)" in line
    assert line in report.markdown([made])


def test_systems_of_several_pairs_are_listed_once() -> None:
    made = record(run("ours", 0, 30), run("vllm", 0, 40))
    other = record(run("ours", 0, 50), run("llama-q4", 0, 40), pair="llama-q4")
    other["systems"]["ours"]["title"] = "4 bits"
    titles = [row[0] for row in report.system_table([made, made, other])[1:]]
    assert sorted(titles) == ["4 bits", "the llama-q4", "the ours", "the vllm"]


def test_a_pair_that_ended_in_its_first_round_has_no_costs() -> None:
    made = record(run("ours", 0, 30))
    made["systems"]["vllm"]["memory"] = []
    assert [row[0] for row in report.system_table([made])[1:]] == ["the ours"]
    assert "Resident memory" not in report.markdown([made])


def test_repeated_and_noisy_runs_are_told() -> None:
    made = record(run("ours", 0, 30, 0.2), run("ours", 0, 30, 0.1), run("vllm", 0, 30))
    assert "2 runs, 1 repeated for load, 1 kept above 5%" in report.note(made)


def test_a_record_survives_a_file() -> None:
    made = record(run("ours", 0, 30), run("vllm", 0, 40), run("ours", 0, 9, workload="P99", p99_itl_ms=5.0))
    assert report.markdown([json.loads(json.dumps(made))]) == report.markdown([made])


def test_the_share_of_the_bandwidth_is_of_single_streams() -> None:
    figures = {"median_ttft_ms": 5.0, "p99_itl_ms": 9.0, "bandwidth": 35e9, "share": 0.8}
    assert cells(BY_NAME["W1"], [run("", 0, 4) | figures])[1:] == [
        "4.0 (4.0 to 4.0)",
        "8",
        "5",
        "250.0",
        "9.0",
        "35",
        "80%",
    ]
    assert cells(BY_NAME["W2"], [run("", 0, 4) | figures])[-1] == ""


def test_files_are_read_whole(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(2500))
    read_files(tmp_path)


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
