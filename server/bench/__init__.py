"""A benchmark for any OpenAI-compatible server: `chairlift bench`.

    report = run_bench(BenchOptions(url="http://127.0.0.1:8000"))
    print_report(report)
    Path("bench.json").write_text(report.to_json())

`run_bench` raises `BenchError`, whose message is one clear line, where nothing can be measured: a URL that is
none, a refused connection, a server without a model. A request that fails is counted, not raised.
"""

from __future__ import annotations

from chairlift.server.bench.drive import run_bench
from chairlift.server.bench.options import BenchError, BenchOptions, Workload
from chairlift.server.bench.report import BenchReport, WorkloadReport, print_report

__all__ = [
    "BenchError",
    "BenchOptions",
    "BenchReport",
    "Workload",
    "WorkloadReport",
    "print_report",
    "run_bench",
]
