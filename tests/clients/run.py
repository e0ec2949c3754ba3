"""Every client against a served model: `python -m tests.clients.run [NAME ...]`, or `make clients`.

Each client is installed into an environment of its own below `build/clients` (from PyPI or npm, once for
each list of packages), and its script is run with the addresses of three servers:

- `CHAIRLIFT_URL`: the embedded model, with an embedding model beside it;
- `SCRIPTED_URL`: `tests/clients/scripted.py`, which answers as the conversation tells;
- `SENTENCE_URL`: `tests/clients/sentence.py`, of long context.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from chairlift.engine.models.embedded import embedded_model
from tests.clients.catalogue import CLIENTS, Client
from tests.clients.sentence import write_sentence_model
from tests.engine.embedding.minilm import NAME as EMBEDDINGS
from tests.engine.embedding.minilm import minilm
from tests.served.process import COMMAND, MODEL

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).with_name("scripts")
BUILD = ROOT / "build" / "clients"
TIMEOUT = 1200.0
"""Seconds for one client's script."""


class Failed(Exception):
    """What went wrong, for the report."""


def install(client: Client) -> Path:
    """The client's environment, made where it is not there."""
    folder = BUILD / client.name
    stamp, wanted = folder / "packages.txt", "\n".join(client.packages)
    if stamp.exists() and stamp.read_text() == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if client.registry == "npm":
        (folder / "package.json").write_text('{"private": true}')
        _run(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", *client.packages], folder)
    else:
        _run([sys.executable, "-m", "venv", str(folder)], folder)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        _run([*pip, "--disable-pip-version-check", *client.packages], folder)
    stamp.write_text(wanted)
    return folder


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


@contextmanager
def served(*command: str) -> Iterator[str]:
    """Base URL of a server that is ready. Raises: Failed where it does not start, or complained."""
    quiet = {**os.environ, "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}  # which mlx-lm sets where it is imported
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command, cwd=ROOT, env=quiet, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            found = next(filter(None, (re.search(r"http://[\w.:]+", line) for line in process.stdout)), None)
            if found is not None:
                yield found[0]
        finally:
            process.terminate()
            process.stdout.read()
        log.seek(0)
        complaints = log.read()
        if complaints or found is None:
            raise Failed(f"{' '.join(command)} said:\n{complaints}")


def environment(home: Path, folder: Path, urls: dict[str, str]) -> dict[str, str]:
    """What a script is told. No key and no setting of the user's own gets in."""
    path = os.pathsep.join([str(folder / "bin"), str(folder / "node_modules" / ".bin"), os.environ["PATH"]])
    return {"PATH": path, "HOME": str(home), "TERM": "dumb", "LANG": "C.UTF-8", **urls}


def exchange(client: Client, folder: Path, urls: dict[str, str]) -> None:
    """Run a client's script in an empty folder, with an empty home. Raises: Failed with all it said."""
    with tempfile.TemporaryDirectory() as scratch:
        home, work = Path(scratch, "home"), Path(scratch, "work")
        home.mkdir()
        work.mkdir()
        script = SCRIPTS / client.script
        if script.suffix == ".mjs":  # node looks for packages beside the script
            command = ["node", shutil.copy(script, folder)]
        else:
            python = folder / "bin" / "python" if client.registry == "pip" else Path(sys.executable)
            command = [str(python), str(script)]
        done = subprocess.run(
            command,
            cwd=work,
            env=environment(home, folder, urls),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
        )
    if done.returncode:
        raise Failed(done.stdout)


def main(names: Sequence[str]) -> int:
    unknown = set(names) - {client.name for client in CLIENTS}
    if unknown:
        print(f"Unknown: {', '.join(sorted(unknown))}. There are {', '.join(c.name for c in CLIENTS)}.")
        return 2
    chosen = [client for client in CLIENTS if not names or client.name in names]
    folders = {client.name: install(client) for client in chosen}
    serve = (COMMAND, "serve", "--port", "0", "--no-access-log")
    both = (
        *("--model", str(embedded_model("float32")), "--served-model-name", MODEL),
        *("--embedding-model", str(minilm()), "--served-embedding-name", EMBEDDINGS),
    )
    sentence = str(write_sentence_model(BUILD / "models" / "sentence"))
    failed = []
    with (
        served(*serve, *both) as url,
        served(sys.executable, "-m", "tests.clients.scripted") as scripted,
        served(*serve, "--model", sentence, "--max-num-batched-tokens", "2048") as long,
    ):
        urls = {"CHAIRLIFT_URL": url, "SCRIPTED_URL": scripted, "SENTENCE_URL": long}
        for client in chosen:
            begun = time.monotonic()
            try:
                exchange(client, folders[client.name], urls)
            except (Failed, subprocess.TimeoutExpired) as error:
                failed.append(client.name)
                print(f"{client.name}: FAILED\n{error}", flush=True)
            else:
                seconds = time.monotonic() - begun
                print(f"{client.name}: ok, {seconds:.0f} s ({', '.join(client.packages)})", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Failed as failure:
        sys.exit(f"{failure}")
