"""`chairlift bench`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from typer.exceptions import TyperException

from chairlift.server.bench import BenchError, BenchOptions, BenchReport, Workload, print_report, run_bench
from chairlift.server.bench.client import Measured


def bench(
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:8000",
    workload: Annotated[
        Workload, typer.Option(help="What the clients do; all runs each of the others in turn.")
    ] = Workload.ALL,
    clients: Annotated[int, typer.Option(help="Requests in flight in batch and turns.")] = 6,
    requests: Annotated[
        int | None, typer.Option(help="Requests of each workload.", show_default="by workload")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 24,
    rate: Annotated[float, typer.Option(help="Mean arrivals a second in mixed.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed sends the same requests.")] = 0,
    model: Annotated[
        str | None, typer.Option(help="As the server names it.", show_default="the first it lists")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Sent as a bearer token.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds without a byte before a request fails.")] = 600.0,
    json: Annotated[
        Path | None,
        typer.Option(help="Write the figures here; - for stdout, the table then going to stderr."),
    ] = None,
) -> int:
    """Measure any OpenAI-compatible server: tokens a second, time to first token, time between tokens."""
    try:
        options = BenchOptions(
            url=url,
            workload=workload,
            clients=clients,
            max_tokens=max_tokens,
            requests=requests,
            rate=rate,
            seed=seed,
            model=model,
            api_key=api_key,
            timeout=timeout,
        )
        report = _run(options)
    except BenchError as error:
        raise TyperException(str(error)) from None
    to_stdout = json is not None and str(json) == "-"
    print_report(report, Console(stderr=to_stdout))
    if to_stdout:
        typer.echo(report.to_json())
    elif json is not None:
        json.write_text(report.to_json() + "\n", encoding="utf-8")
    return 0


def _run(options: BenchOptions) -> BenchReport:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("warming up")
        ended: dict[Workload, int] = {}

        def done(workload: Workload, measured: Measured) -> None:
            ended[workload] = ended.get(workload, 0) + 1
            progress.update(task, description=f"{workload}: {ended[workload]}/{options.count(workload)}")

        return run_bench(options, on_done=done)
