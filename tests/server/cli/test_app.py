"""The command line: what it passes on, what it prints, and how it fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from chairlift.__main__ import main
from chairlift.engine.config import EngineConfig
from chairlift.engine.embedding.types import EmbeddingModelInfo
from chairlift.engine.errors import InvalidParameter, ModelUnavailable
from chairlift.engine.models.resolve import ModelSource
from chairlift.engine.plan import ModelInfo, RunnerStats
from chairlift.engine.quantities import count, size
from chairlift.server.cli.app import run
from chairlift.server.cli.serve import announce
from chairlift.server.configuration.types import parse_size
from chairlift.server.models.model import Use
from chairlift.server.observe.settings import ObserveSettings
from chairlift.server.served import EmbeddingServing, ModelOptions, ServeOptions, Serving
from chairlift.server.settings import ParserSettings, ServerSettings
from tests.engine.models.gguf_files import Llama
from tests.fakes import FakeRunner, answering, fake_model

Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def complaint(capsys: Captured) -> str:
    """The one line on stderr; nothing is on stdout."""
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("chairlift: ")
    return err.removeprefix("chairlift: ").strip()


def test_version(capsys: Captured) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr() == (f"chairlift {version('chairlift')}\n", "")


def test_help_names_the_commands(capsys: Captured) -> None:
    assert run([]) == 0
    shown = capsys.readouterr().out
    for command in ("serve", "import", "generate", "bench"):
        assert command in shown
        assert run([command, "--help"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ride"], "No such command 'ride'."),
        (["serve", "--port", "70000"], "--port"),
        (["serve", "--max-num-seqs", "0"], "--max-num-seqs"),
        (["serve", "--dtype", "int4"], "--dtype"),
        (["serve", "--reasoning-parser", "odd"], "--reasoning-parser"),
        (["serve", "--tool-call-parser", "odd"], "--tool-call-parser"),
        (["import"], "FILE.gguf"),
        (["generate"], "PROMPT"),
        (["bench", "--workload", "skiing"], "--workload"),
    ],
)
def test_wrong_usage_is_2_and_one_line(arguments: list[str], message: str, capsys: Captured) -> None:
    assert run(arguments) == 2
    assert message in complaint(capsys)


@pytest.fixture
def served(monkeypatch: Patch) -> list[ServeOptions]:
    """Options of `serve`, instead of a server that ends with exit code 7."""
    options: list[ServeOptions] = []

    def run_server(given: ServeOptions, announce: object, complain: object) -> int:
        options.append(given)
        return 7

    monkeypatch.setattr("chairlift.server.serve.run_server", run_server)
    monkeypatch.setattr("chairlift.server.cli.serve.set_up_logging", lambda *args, **settings: None)
    return options


def test_serve_without_options(served: list[ServeOptions]) -> None:
    assert run(["serve"]) == 7
    assert served == [ServeOptions(settings=ServerSettings(observe=ObserveSettings(access_log=True)))]


def test_serve_passes_every_option_on(served: list[ServeOptions]) -> None:
    given = {
        "--model": "org/name",
        "--served-model-name": "up",
        "--host": "0.0.0.0",
        "--port": "81",
        "--dtype": "bfloat16",
        "--max-num-seqs": "3",
        "--max-num-batched-tokens": "64",
        "--max-waiting": "0",
        "--max-model-len": "99",
        "--kv-cache-dtype": "int4",
        "--chat-template": __file__,
        "--reasoning-parser": "qwen3",
        "--tool-call-parser": "hermes",
        "--drain-timeout": "1.5",
        "--body-limit": "0.5",
        "--log-level": "debug",
    }
    assert (
        run(
            [
                "serve",
                "--no-access-log",
                "--log-prompts",
                *(part for option in given.items() for part in option),
            ]
        )
        == 7
    )
    assert served == [
        ServeOptions(
            models=(
                ModelOptions(
                    model="org/name",
                    name="up",
                    dtype="bfloat16",
                    max_model_len=99,
                    kv_cache_dtype="int4",
                    chat_template=Path(__file__),
                    engine=EngineConfig(max_num_seqs=3, max_num_batched_tokens=64, max_waiting=0),
                ),
            ),
            host="0.0.0.0",
            port=81,
            drain_timeout=1.5,
            settings=ServerSettings(
                max_body_bytes=2**19,
                parsers=ParserSettings("qwen3", "hermes"),
                observe=ObserveSettings(log_prompts=True),
            ),
        )
    ]


def test_serve_passes_an_embedding_model_on(monkeypatch: Patch) -> None:
    served: list[ServeOptions] = []

    def run_server(options: ServeOptions, *others: object) -> int:
        served.append(options)
        return 0

    monkeypatch.setattr("chairlift.server.serve.run_server", run_server)
    given = ("--embedding-model", "org/e", "--served-embedding-name", "e", "--embedding-pooling", "cls")
    assert run(["serve", *given]) == 0
    (options,) = served
    assert options.models == (ModelOptions(model="org/e", name="e", use=Use.EMBEDDING, pooling="cls"),)


def test_serve_says_what_embeds(capsys: Captured) -> None:
    info = EmbeddingModelInfo(
        name="MiniLM",
        context_length=256,
        dimensions=384,
        vocab_size=30522,
        created=0,
        architecture="bert",
        pooling="mean",
        batch_tokens=512,
        device="CPU",
        dtype="float32",
        parameters=22_565_376,
        weight_bytes=90_261_504,
    )
    serving = EmbeddingServing("http://127.0.0.1:8000", info)
    announce(serving)
    assert capsys.readouterr().out == (
        f"Chairlift {version('chairlift')} serves MiniLM at http://127.0.0.1:8000/v1\n"
        "  model   bert, 22.6M parameters, float32, texts of up to 256 tokens\n"
        "  device  CPU\n"
        "  makes   vectors of 384 numbers, pooled by mean\n"
        "  batch   up to 512 tokens\n"
        "  memory  weights 90.3 MB\n"
        f"Try it:\n{serving.curl}\n"
    )


def test_serve_says_what_and_where(capsys: Captured) -> None:
    info = ModelInfo(
        name="SmolLM2",
        context_length=8192,
        created=0,
        architecture="llama",
        batching="flat",
        device="CPU",
        dtype="float32",
        parameters=134_515_008,
        weight_bytes=538_060_032,
        kv_bytes_per_token=46_080,
        kv_dtype="bfloat16",
    )
    config = EngineConfig(max_num_batched_tokens=512, prefix_cache_bytes=2_000_000_000)
    serving = Serving("http://127.0.0.1:8000", info, RunnerStats(), config, has_chat_template=True)
    announce(serving)
    assert capsys.readouterr().out == (
        f"Chairlift {version('chairlift')} serves SmolLM2 at http://127.0.0.1:8000/v1\n"
        "  model   llama, 135M parameters, float32, context of 8,192 tokens\n"
        "  device  CPU\n"
        "  batch   up to 32 requests at once (flat), 256 waiting, 512 tokens a step\n"
        "  memory  weights 538 MB, KV bfloat16 46.1 kB a token, at most 377 MB a request\n"
        "  prefix  up to 2 GB kept for later requests\n"
        f"Try it:\n{serving.curl}\n"
    )
    announce(replace(serving, longest=2049))
    out = capsys.readouterr().out
    assert "context of 8,192 tokens, of which there is memory for 2,049 (--memory-limit)\n" in out
    assert "46.1 kB a token, at most 94.4 MB a request" in out


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (46_080, "46.1 kB"), (999_499, "999 kB"), (999_500, "1 MB")),
        *((5 * 10**8, "500 MB"), (16 * 10**9, "16 GB")),
    ],
)
def test_sizes(number: int, text: str) -> None:
    assert size(number) == text


def test_sizes_to_be_compared() -> None:
    assert (size(102_911_200, 4), size(102_949_000, 4)) == ("102.9 MB", "102.9 MB")
    assert (size(1_042_100, 4), size(999_960, 4)) == ("1.042 MB", "1 MB")


@pytest.mark.parametrize(
    ("number", "text"), [(12, "12"), (4_000, "4k"), (134_515_008, "135M"), (8_030_261_248, "8.03B")]
)
def test_counts(number: int, text: str) -> None:
    assert count(number) == text


def test_import_writes_a_folder(tmp_path: Path, capsys: Captured) -> None:
    path = Llama().write(tmp_path / "lift.gguf")
    assert run(["import", str(path)]) == 0
    assert (tmp_path / "lift" / "model.safetensors").is_file()
    assert str(tmp_path / "lift") in capsys.readouterr().out
    assert run(["import", str(path), "--to", str(tmp_path / "other"), "--dtype", "float16"]) == 0
    assert '"torch_dtype": "float16"' in (tmp_path / "other" / "config.json").read_text()
    capsys.readouterr()
    assert run(["import", str(path)]) == 1
    assert complaint(capsys) == f"{tmp_path / 'lift'} exists already; name another folder."


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (ModelUnavailable("No such model."), "No such model."),
        (InvalidParameter("seed", "seed must be whole."), "seed must be whole."),
        (ZeroDivisionError("division\nby zero"), "Internal error: ZeroDivisionError: division by zero"),
    ],
)
def test_faults_are_one_line_and_1(
    fault: Exception, message: str, monkeypatch: Patch, capsys: Captured
) -> None:
    monkeypatch.setattr("chairlift.engine.models.gguf.convert_gguf", raising(fault))
    assert run(["import", "x.gguf"]) == 1
    assert complaint(capsys) == message


def test_an_interrupt_is_130_and_silent(monkeypatch: Patch, capsys: Captured) -> None:
    monkeypatch.setattr("chairlift.engine.models.gguf.convert_gguf", raising(KeyboardInterrupt()))
    assert run(["import", "x.gguf"]) == 130
    assert capsys.readouterr() == ("", "")


def raising(fault: BaseException) -> Callable[..., None]:
    def convert_gguf(*args: object, **settings: object) -> None:
        raise fault

    return convert_gguf


@pytest.fixture
def lift(monkeypatch: Patch) -> FakeRunner:
    """`generate` over a model that always gives the same answer."""
    pytest.importorskip("mlx.core")
    runner = FakeRunner(answering("Up, née ⛷!"))
    source = ModelSource(Path("folder"), "fake")
    monkeypatch.setattr("chairlift.engine.models.resolve.resolve_model", lambda *args, **settings: source)
    load = fake_model(runner)
    monkeypatch.setattr("chairlift.engine.models.loader.load_model", lambda *args, **settings: load())
    return runner


def test_generate_streams_the_answer(lift: FakeRunner, capsys: Captured) -> None:
    assert run(["generate", "Hello"]) == 0
    assert capsys.readouterr() == ("Up, née ⛷!\n", "")
    assert lift.closed


def test_generate_bounds_and_refusals(lift: FakeRunner, capsys: Captured) -> None:
    assert run(["generate", "Hello", "--raw", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out == "Up\n"
    assert run(["generate", "Hello", "--temperature", "9"]) == 1
    assert complaint(capsys) == "temperature must be at most 2, not 9."


def test_bench_without_a_server_is_one_line(capsys: Captured) -> None:
    assert run(["bench", "--url", "ftp://x"]) == 1
    assert "is no http URL" in complaint(capsys)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("off", 0),
        ("auto", None),
        ("8GB", 8 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5g", 1_500_000_000),
        ("7", 7),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, expected: int | None) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "lots", "8XB", "-1GB", "1e9", "GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no size such as"):
        parse_size(text)


def test_ctrl_c_while_it_still_imports_leaves_no_trace(monkeypatch: Patch) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "chairlift.server.cli.app", Interrupted("app"))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
