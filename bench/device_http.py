"""Servers over HTTP on one accelerator, random weights of real shapes: `python bench/device_http.py`.

Each server in turn gets the same folder and the same requests, from client processes of their own that only
count: (a) streams, N at once, prompts of 128 tokens and answers of 128; (b) joins, N at once for a while,
prompts of 32 to 512 tokens and answers of 16 to 256, a new request for each that ends; (c) turns, Chairlift
alone: a prompt of `--long` tokens, then its next turn from memory, and after a restart from disk. Writes
device_http.json to --out (or $OUT) after every part.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from counting_client import Answer, Job, ask, text
from device import machine
from device_models import SHAPES, TINY_SHAPES, Shape, build
from device_paths import Deadline, bare, equal_caches
from device_report import http_section
from peers import CHAIRLIFT, MLX_LM, Peer, Serving, serving
from random_model import write_model

CLIENT = Path(__file__).with_name("counting_client.py")
PROCESSES = 4
"""Clients' processes: one alone cannot read as fast as 128 streams come."""


def drive(port: int, model: str, queues: list[list[Job]], seconds: float) -> list[Answer]:
    """What the streams of `queues` came to; no request begins after `seconds`."""
    shares = [queues[index::PROCESSES] for index in range(PROCESSES) if queues[index::PROCESSES]]
    clients = [
        subprocess.Popen(
            [sys.executable, str(CLIENT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in shares
    ]
    pipes = [(client.stdin, client.stdout) for client in clients]
    for _, output in pipes:
        assert output is not None and output.readline() == "ready\n"
    for (given, _), share in zip(pipes, shares, strict=True):
        assert given is not None
        given.write(json.dumps({"port": port, "model": model, "queues": share, "seconds": seconds}) + "\n")
        given.flush()
    answers = [Answer(**answer) for client in clients for answer in json.loads(client.communicate()[0])]
    return answers


def rates(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens a second over the whole, and while all streams decode (where they all do)."""
    good = [answer for answer in answers if not answer.failed and answer.tokens]
    if not good:
        return {"failed": len(answers), "why": answers[0].failed if answers else "no answer"}
    begin = min(answer.started for answer in good)
    end = max(answer.tokens[-1] for answer in good)
    first, last = max(a.tokens[0] for a in good), min(a.tokens[-1] for a in good)
    times = sorted(at for answer in good for at in answer.tokens)
    per_chunk = sum(a.completion for a in good) / max(1, len(times))
    steady = sum(first < at <= last for at in times) * per_chunk / (last - first) if last > first else None
    waits = sorted(answer.tokens[0] - answer.started for answer in good)
    return {
        "requests": len(good),
        "failed": len(answers) - len(good),
        "tok_s": sum(a.completion for a in good) / (end - begin),
        "steady_tok_s": steady,
        "ttft_p50": waits[len(waits) // 2],
        "ttft_max": waits[-1],
    }


@dataclass(frozen=True)
class Server:
    peer: Peer
    model: str
    """What requests ask for."""
    options: Callable[[int], list[str]]
    """Of the most rows at once."""

    def serving(self, folder: Path, rows: int, *more: str) -> AbstractContextManager[Serving]:
        return serving(self.peer, folder, more=[*self.options(rows), *more])


SERVERS = {
    "chairlift": Server(
        CHAIRLIFT, "m", lambda rows: ["--served-model-name", "m", "--max-num-seqs", str(rows)]
    ),
    "mlx_lm": Server(
        MLX_LM,
        "default_model",
        lambda rows: ["--decode-concurrency", str(rows), "--prompt-concurrency", "8"],
    ),
}


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.until = time.monotonic() + arguments.seconds
        self.result: dict[str, Any] = {"machine": machine(arguments.revision), "parts": []}
        self.result["arguments"] = shlex.join(sys.argv[1:])

    def run(self) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            self._run(Path(scratch))

    def _run(self, scratch: Path) -> None:
        for name in self.arguments.models:
            folder = scratch / name
            shape = SHAPES[name]
            if self.arguments.tiny:
                shape = replace(TINY_SHAPES[name], config={**TINY_SHAPES[name].config, "vocab_size": 512})
            dtype = mx.float32 if self.arguments.tiny else mx.bfloat16
            write_model(shape, folder, dtype)
            if "streams" in self.arguments.parts:
                self._bare(shape, dtype)
            gc.collect()
            mx.clear_cache()
            for server in self.arguments.servers:
                self._part(name, server, folder)
            if "turns" in self.arguments.parts:
                self._turns(name, folder, scratch / "disk")
            shutil.rmtree(folder)

    def _bare(self, shape: Shape, dtype: mx.Dtype) -> None:
        """The model's own step at as many rows, without a server."""
        model = build(shape, dtype)
        for rows in self.arguments.streams:
            caches = equal_caches(model, rows, 128, masked=True)
            steps = bare(model, caches, rows, 48, Deadline(10))
            rate = steps.steady_tokens_per_s(rows)
            self._add({"model": shape.name, "server": "bare", "part": "bare", "streams": rows, "tok_s": rate})

    def _part(self, name: str, server: str, folder: Path) -> None:
        parts = [part for part in self.arguments.parts if part != "turns"]
        if not parts:
            return
        model, scale = SERVERS[server].model, 16 if self.arguments.tiny else 1
        rows = max(*self.arguments.streams, *self.arguments.join_streams)
        try:
            with SERVERS[server].serving(folder, rows) as served:
                self._add({"model": name, "server": server, "part": "start", "ready_s": served.ready_s})
                drive(served.port, model, [[(64 // scale, 8, 1)]] * 2, 60)
                for part in parts:
                    counts = self.arguments.streams if part == "streams" else self.arguments.join_streams
                    for count in counts:
                        if time.monotonic() > self.until:
                            return
                        answers = drive(
                            served.port, model, jobs(part, count, scale), self.arguments.part_seconds
                        )
                        entry = {"model": name, "server": server, "part": part, "streams": count}
                        self._add(entry | rates(answers))
        except Exception as error:
            self._add({"model": name, "server": server, "part": "error", "why": str(error)[-600:]})

    def _turns(self, name: str, folder: Path, disk: Path) -> None:
        """A long prompt; its next turn, whose prompt is the first with the answer and some text more."""
        long = 600 if self.arguments.tiny else self.arguments.long
        options = (
            *("--prefix-cache-disk", "40GB", "--prefix-cache-dir", str(disk)),
            *("--prefix-cache-ram", "16GB"),
        )
        prompts = [text(long, 11), text(long, 12)]
        entry: dict[str, Any] = {"model": name, "server": "chairlift", "part": "turns", "tokens": long}

        def first_token(port: int, prompt: str) -> tuple[float, int]:
            answer = asyncio.run(ask(port, prompt, 4, "m"))
            if answer.failed or not answer.tokens:
                raise RuntimeError(answer.failed or "no content")
            return answer.tokens[0] - answer.started, answer.cached

        try:
            with SERVERS["chairlift"].serving(folder, 4, *options) as served:
                entry["warm_up_s"] = first_token(served.port, prompts[0])[0]
                entry["cold_s"], _ = first_token(served.port, prompts[1])
                entry["ram_s"], entry["ram_cached"] = first_token(served.port, prompts[1] + text(100, 13))
                entry["ram_again_s"], _ = first_token(served.port, prompts[1] + text(120, 14))
            with SERVERS["chairlift"].serving(folder, 4, *options) as served:
                entry["other_disk_s"], entry["other_disk_cached"] = first_token(
                    served.port, prompts[0] + text(100, 15)
                )
                entry["disk_s"], entry["disk_cached"] = first_token(served.port, prompts[1] + text(100, 16))
        except Exception as error:
            entry["why"] = str(error)[-600:]
        self._add(entry)
        shutil.rmtree(disk, ignore_errors=True)

    def _add(self, entry: dict[str, Any]) -> None:
        self.result["parts"].append(entry)
        print(json.dumps(entry), flush=True)
        self.arguments.out.mkdir(parents=True, exist_ok=True)
        (self.arguments.out / "device_http.json").write_text(json.dumps(self.result, indent=1) + "\n")


def jobs(part: str, streams: int, scale: int) -> list[list[Job]]:
    """One queue of requests for each stream; the same for every server."""
    if part == "streams":
        return [[(128 // scale, 128 // scale, 1000 + index)] for index in range(streams)]
    draw = random.Random(streams)
    return [
        [
            (draw.randint(32, 512) // scale, draw.randint(16, 256) // scale, 10**6 + 1000 * index + turn)
            for turn in range(400)
        ]
        for index in range(streams)
    ]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--servers", nargs="+", choices=list(SERVERS), default=list(SERVERS))
    parser.add_argument(
        "--parts", nargs="+", choices=["streams", "joins", "turns"], default=["streams", "joins"]
    )
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--join-streams", nargs="+", type=int, default=[32, 128])
    parser.add_argument("--part-seconds", type=float, default=15.0, help="no request begins after so many")
    parser.add_argument("--seconds", type=float, default=400.0, help="no part begins after so many")
    parser.add_argument("--long", type=int, default=32000, help="tokens of the prompt of turns")
    parser.add_argument("--revision", help="the commit measured, where git does not know it")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script on a CPU")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "."))
    return parser.parse_args(argv)


def main() -> None:
    bench = Bench(parse())
    bench.run()
    print(http_section(bench.result))


if __name__ == "__main__":
    main()
