"""Results beside the limits of the machine, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from roofline_kernels import Result
from roofline_limits import BandwidthMemory, peak
from roofline_steps import REST, STEP

from pypto_serving.kernels import Engine


@dataclass
class Ceilings:
    """The machine's limits, measured again and again between the groups of cases, for other tenants come and go.

    Bytes per second with all threads; operations per second with all threads and with one.
    """

    bandwidths: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    int8_peaks: list[float] = field(default_factory=list)
    single_peaks: list[float] = field(default_factory=list)

    def measure(self, memory: BandwidthMemory, engine: Engine, single: Engine) -> None:
        """Add one measurement of each."""
        self.bandwidths.append(memory.bandwidth(engine))
        self.peaks.append(peak(engine))
        self.int8_peaks.append(peak(engine, int8=True))
        self.single_peaks.append(peak(single))

    def lines(self) -> Iterator[str]:
        """Yield the best of each limit, and all that were measured."""
        named = (
            ("read bandwidth", "GB/s", self.bandwidths),
            ("dot products, all threads", "GFLOP/s", self.peaks),
            ("dot products of int8, all threads", "GOP/s", self.int8_peaks),
            ("dot products, one thread", "GFLOP/s", self.single_peaks),
        )
        for name, unit, values in named:
            seen = ", ".join(f"{value / 1e9:.1f}" for value in values)
            yield f"{name}: {max(values) / 1e9:.1f} {unit} (seen {seen})"


@dataclass(frozen=True)
class Rated:
    """A result with its bytes, its operations, and the limit that binds it: the best one measured."""

    result: Result
    bytes: float
    flops: float
    bound: str

    @staticmethod
    def of(result: Result, ceilings: Ceilings) -> Rated:
        """Sum the bytes and operations of a result's works."""
        total_bytes, flops = sum(w.bytes for w in result.works), sum(w.flops for w in result.works)
        peaks = max(ceilings.peaks), max(ceilings.int8_peaks)
        compute_s = sum(w.compute_seconds(*peaks) for w in result.works)
        bound = "memory" if total_bytes / max(ceilings.bandwidths) >= compute_s else "compute"
        return Rated(result, total_bytes, flops, bound if result.works else "")

    @property
    def times(self) -> list[str]:
        """Return the cells of TIMES."""
        return [f"{1e6 * self.result.best:.1f}", f"{1e6 * self.result.median:.1f}"]

    @property
    def rates(self) -> list[str]:
        """Return the cells of RATES."""
        best, limit, fraction = self.result.best, self.result.limit, self.result.fraction
        amounts = [f"{self.bytes / 1e6:.2f}", f"{self.flops / 1e9:.3f}"]
        speeds = [f"{self.bytes / best / 1e9:.1f}", f"{self.flops / best / 1e9:.1f}"]
        return [*amounts, *speeds, f"{1e6 * limit:.1f}", self.bound, f"{fraction:.0%}"]


Rows = list[list[str]]
TIMES = ["best µs", "median µs"]
RATES = ["MB", "GFLOP", "GB/s", "GFLOP/s", "limit µs", "bound by", "of limit"]


def kernel_table(rated: Sequence[Rated]) -> Rows:
    """Return a heading and one line per case."""
    return [["kernel", "shape", *TIMES, *RATES], *([r.result.name, r.result.shape, *r.times, *r.rates] for r in rated)]


def step_table(rated: Sequence[Rated]) -> Rows:
    """Return a heading and one line per kind of operation of each step, with its share of the step's median time."""
    whole = {one.result.shape: one for one in rated if one.result.name == STEP}
    rows = [["step", "operation", *TIMES, "share", *RATES]]
    for one in rated:
        share = one.result.median / whole[one.result.shape].result.median
        rates = [""] * len(RATES) if one.result.name == REST else one.rates
        rows.append([one.result.shape, one.result.name, *one.times, f"{share:.1%}", *rates])
    return rows


def speed_table(rated: Sequence[Rated], tokens: dict[str, int]) -> Rows:
    """Return a heading and one line per step: tokens per second, measured and at the limit. `tokens`: of each step."""
    rows = [["step", "tok/s best", "tok/s median", "tok/s at the limit", "of limit"]]
    for one in rated:
        if one.result.name == STEP:
            count, times = tokens[one.result.shape], (one.result.best, one.result.median, one.result.limit)
            rows.append([one.result.shape, *(f"{count / value:.1f}" for value in times), f"{one.result.fraction:.0%}"])
    return rows
