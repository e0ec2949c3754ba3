"""A server as a process: start, signals, exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from chairlift.engine.embedding.types import EmbeddingModelInfo, Task
from chairlift.engine.engine import EngineConfig
from chairlift.engine.plan import ModelInfo, RunnerStats
from chairlift.server.security.settings import SecuritySettings
from chairlift.server.serve import listen, run_server
from chairlift.server.served import EmbeddingServing, ModelOptions, ServeOptions, Serving
from chairlift.server.settings import ServerSettings
from tests.server.harness import error_of, sse

ROOT = Path(__file__).parents[2]
BODY = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
PATIENCE = 60
"""Seconds after which a process that hangs fails the test."""


class Process:
    def __init__(self, drain: float, answer: str, *more: str, **environment: str) -> None:
        command = [sys.executable, "-m", "tests.server.fake_serve", "0", str(drain), answer, *more]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.url = self.line()
        self.line()  # the curl line, or that it loads

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Exit code and stderr, without its log of requests."""
        _, err = self.process.communicate(timeout=PATIENCE)
        lines = [line for line in err.splitlines(keepends=True) if not line.startswith(("GET /", "POST /"))]
        return self.process.returncode, "".join(lines)

    def told(self) -> list[str]:
        """Its log, where it has one, at its end."""
        code, err = self.end()
        assert code == 0
        return [json.loads(line)["message"] for line in err.splitlines()]


@contextmanager
def serving(drain: float, answer: str, *more: str, **environment: str) -> Iterator[Process]:
    process = Process(drain, answer, *more, **environment)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.communicate()


@contextmanager
def stream(url: str) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun to answer."""
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json={**BODY, "stream": True}, timeout=PATIENCE
    ) as r:
        assert r.status_code == 200
        lines = r.iter_lines()
        for line in lines:
            if '"content":' in line and '"role"' not in line:
                break
        yield lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_idle_it_leaves_with_0(number: signal.Signals) -> None:
    with serving(10, "short", LOGGED="1") as process:
        assert httpx.get(f"{process.url}/health/ready").status_code == 200
        answer = httpx.post(f"{process.url}/v1/chat/completions", json=BODY).json()
        assert answer["choices"][0]["message"]["content"] == "short"
        process.signal(number)
        loaded, stopped = process.told()
        assert re.fullmatch(r"fake is loaded: at the start \(\d+\.\d s\)", loaded)
        assert stopped == f"{number.name}: the server stops"


@pytest.mark.parametrize("kind", ["embeddings", "both"])
def test_an_embedding_model_beside_another_or_alone(kind: str) -> None:
    with serving(10, kind) as process:
        assert httpx.get(f"{process.url}/health/ready").status_code == 200
        body = {"model": "embedder", "input": "up"}
        assert len(httpx.post(f"{process.url}/v1/embeddings", json=body).json()["data"][0]["embedding"]) == 4
        chat = httpx.post(f"{process.url}/v1/chat/completions", json=BODY)
        assert chat.status_code == (200 if kind == "both" else 404)
        process.signal()
        assert process.end() == (0, "")


def test_a_model_that_cannot_be_loaded_is_told_and_the_others_serve() -> None:
    with serving(10, "unembeddable") as process:
        assert httpx.get(f"{process.url}/health/ready").status_code == 200
        assert httpx.post(f"{process.url}/v1/chat/completions", json=BODY).status_code == 200
        states = {card["id"]: card["state"] for card in httpx.get(f"{process.url}/v1/models").json()["data"]}
        assert states == {"fake": "loaded", "embedding": "failed"}
        body = {"model": "embedding", "input": "up"}
        refused = error_of(httpx.post(f"{process.url}/v1/embeddings", json=body), 503)
        assert refused["code"] == "model_failed" and "These weights embed nothing." in str(refused["message"])
        process.signal()
        assert process.end() == (0, "embedding is not served for now: These weights embed nothing.\n")


def test_a_running_answer_ends_with_an_error_event_after_the_drain() -> None:
    with serving(0.2, "endless") as process, stream(process.url) as lines:
        process.signal()
        text = "\n".join(lines)
        assert process.end() == (0, "")
    name, data = sse(text[text.index("event: error") :].rstrip("\n") + "\n\n")[-1]
    assert name == "error"
    error = json.loads(data)["error"]
    assert (error["type"], error["code"]) == ("server_error", "unavailable")
    assert "[DONE]" not in text


def test_while_it_drains_it_admits_nothing_and_a_second_signal_ends_it_at_once() -> None:
    with serving(3600, "endless") as process, stream(process.url) as lines:
        process.signal()
        for _ in lines:  # goes on
            ready = httpx.get(f"{process.url}/health/ready")
            if ready.status_code == 503:
                break
        assert ready.json()["status"] == "draining"
        assert "error" in ready.json()
        assert httpx.get(f"{process.url}/health").status_code == 200
        refused = httpx.post(f"{process.url}/v1/chat/completions", json=BODY)
        assert error_of(refused, 503)["code"] == "unavailable"
        assert next(lines) is not None
        process.signal()
        assert process.end()[0] == 0
        with pytest.raises(httpx.TransportError):
            list(lines)


def test_a_wedged_model_is_left_behind_with_an_exit_code() -> None:
    with serving(0.1, "wedge") as process:
        with httpx.stream("POST", f"{process.url}/v1/chat/completions", json={**BODY, "stream": True}) as r:
            process.signal()
            assert "event: error" in r.read().decode()
        code, err = process.end()
    assert code == 1
    assert "does not come back" in err


def test_while_the_model_loads_it_is_live_and_not_ready_and_can_be_stopped() -> None:
    with serving(10, "slow", LOGGED="1") as process:
        assert httpx.get(f"{process.url}/health").status_code == 200
        ready = httpx.get(f"{process.url}/health/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "loading")
        refused = httpx.post(f"{process.url}/v1/chat/completions", json=BODY)
        assert error_of(refused, 503)["code"] == "unavailable"
        (listed,) = httpx.get(f"{process.url}/v1/models").json()["data"]
        assert listed["state"] == "loading"
        process.signal()
        assert process.told() == ["SIGTERM: the server stops, while generation still loads"]


def test_it_can_be_stopped_while_a_model_is_loaded_on_demand() -> None:
    with serving(10, "latecomer") as process, ThreadPoolExecutor(1) as threads:
        late = threads.submit(
            httpx.post, f"{process.url}/v1/chat/completions", json={**BODY, "model": "late"}, timeout=PATIENCE
        )
        assert process.line() == "loading"
        answer = httpx.post(f"{process.url}/v1/chat/completions", json=BODY).json()
        assert answer["choices"][0]["message"]["content"] == "short"
        assert httpx.get(f"{process.url}/health/ready").status_code == 200
        process.signal()
        assert error_of(late.result(), 503)["code"] == "unavailable"
        assert process.end() == (0, "")


def test_a_model_that_cannot_be_loaded_is_one_line_and_1() -> None:
    with serving(10, "unloadable") as process:
        assert process.end() == (1, "These weights are no weights.\n")


def test_a_port_in_use_is_one_line_and_1() -> None:
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = run_server(ServeOptions(port=port), lambda serving: None, lines.append)
    assert code == 1
    (line,) = lines
    assert f"127.0.0.1:{port}" in line and "in use" in line


def test_a_host_that_is_not_ours_is_one_line_and_1() -> None:
    lines: list[str] = []
    settings = ServerSettings(security=SecuritySettings(insecure=True))
    options = ServeOptions(host="192.0.2.1", port=0, settings=settings)
    assert run_server(options, lambda serving: None, lines.append) == 1
    assert len(lines) == 1 and lines[0].startswith("Cannot listen on 192.0.2.1:0: ")


def test_a_model_that_does_not_exist_is_one_line_and_1(tmp_path: Path) -> None:
    lines: list[str] = []
    options = ServeOptions(models=(ModelOptions(str(tmp_path / "nowhere")),), port=0)
    assert run_server(options, lambda serving: None, lines.append) == 1
    assert len(lines) == 1 and "\n" not in lines[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_is_fetched_is_0(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    inherited = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background jobs
    before = {stop: signal.getsignal(stop) for stop in (signal.SIGTERM, signal.SIGINT)}
    cleaned: list[bool] = []

    def fetch(*args: object, **kwargs: object) -> None:
        try:
            signal.raise_signal(number)
        finally:
            cleaned.append(True)

    monkeypatch.setattr("chairlift.engine.models.resolve.resolve_model", fetch)
    try:
        assert run_server(ServeOptions(port=0), lambda serving: None, lambda line: None) == 0
        assert {stop: signal.getsignal(stop) for stop in before} == before
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert cleaned == [True]


def test_listen_takes_a_free_port() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0


@pytest.mark.parametrize(("task", "path"), [(Task.EMBED, "/v1/embeddings"), (Task.SCORE, "/v1/rerank")])
def test_the_curl_line_of_an_embedding_model(task: Task, path: str) -> None:
    info = EmbeddingModelInfo("it's/a model", 64, 4, 256, 0, task)
    curl, url, *_, body = shlex.split(EmbeddingServing("http://127.0.0.1:1", info).curl)
    assert (curl, url) == ("curl", f"http://127.0.0.1:1{path}")
    assert json.loads(body)["model"] == "it's/a model"


@pytest.mark.parametrize(("template", "path"), [(True, "/v1/chat/completions"), (False, "/v1/completions")])
def test_the_curl_line_is_a_shell_command(template: bool, path: str) -> None:
    info = ModelInfo("it's/a model", 4096, 0)
    line = Serving("http://127.0.0.1:1", info, RunnerStats(), EngineConfig(), template).curl
    curl, url, _, header, _, body = shlex.split(line)
    assert (curl, url, header) == ("curl", f"http://127.0.0.1:1{path}", "Content-Type: application/json")
    assert json.loads(body)["model"] == "it's/a model"
