"""From what is asked for to a definition."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from chairlift.server.service.arguments import outcome_of
from chairlift.server.service.define import Wanted, define, interpreter, unreadable
from chairlift.server.service.definition import Credential, ServiceDefinition
from chairlift.server.service.errors import ServiceFault
from chairlift.server.service.places import Person, Platform, operator, person
from chairlift.server.service.systemd_unit import unit

ADA = Person("ada", 501, 20, Path("/Users/ada"))
NO_FILE = ("--config", "/dev/null")


def defined(
    platform: Platform,
    *words: str,
    system: bool = False,
    who: Person | None = ADA,
    variables: dict[str, str] | None = None,
    environment: dict[str, str] | None = None,
    name: str = "chairlift",
) -> ServiceDefinition:
    outcome = outcome_of([*NO_FILE, *words] if "--config" not in words else words)
    wanted = Wanted(platform, name, system, who, outcome, variables or {}, Path("/here"))
    return define(wanted, environment or {})


def test_an_agent() -> None:
    service = defined(Platform.LAUNCHD, "--port", "9000")
    logs = Path("/Users/ada/Library/Logs/chairlift")
    state = Path("/Users/ada/Library/Application Support/chairlift/service")
    assert service.program == (
        *(interpreter(), "-P", "-m", "chairlift", "service", "run"),
        *("--record", str(state / "chairlift.json"), "--output", str(logs / "chairlift.out"), "--"),
    )
    assert service.serve == (*NO_FILE, "--port", "9000", "--log-file", str(logs / "chairlift.log"))
    assert (service.user, service.working_folder, service.output) == (None, state, logs / "chairlift.out")
    assert service.folders == (
        state,
        Path("/Users/ada/Library/Caches/chairlift"),
        Path("/Users/ada/.cache/huggingface"),
        logs,
    )
    environment = service.environment
    assert environment["HOME"] == "/Users/ada"
    assert environment["HF_HOME"] == "/Users/ada/.cache/huggingface"
    assert environment["CHAIRLIFT_CACHE"] == "/Users/ada/Library/Caches/chairlift"
    assert environment["PATH"].split(":")[0] == str(Path(interpreter()).parent)
    assert all(part.startswith("/") for part in environment["PATH"].split(":"))
    assert "LD_PRELOAD" not in environment
    assert service.credentials == ()


def test_a_daemon_has_a_user() -> None:
    assert defined(Platform.LAUNCHD, system=True).user == "ada"


def test_a_log_of_ones_own_stays() -> None:
    service = defined(Platform.LAUNCHD, "--log-file", "/var/log/lift.log")
    assert service.serve == (*NO_FILE, "--log-file", "/var/log/lift.log")
    assert Path("/var/log") in service.folders


def test_a_users_unit() -> None:
    who = Person("ada", 1000, 1000, Path("/home/ada"))
    service = defined(Platform.SYSTEMD, who=who)
    assert service.program[-5:] == (
        *("--record", "/home/ada/.local/state/chairlift/chairlift.json", "--gave-up-exit", "78", "--"),
    )
    assert service.serve == NO_FILE and service.output is None
    assert service.watchdog_s == 660


def test_a_units_own_user_has_folders_of_systemds() -> None:
    service = defined(Platform.SYSTEMD, system=True, who=None, name="small")
    assert service.user is None and service.folders == ()
    assert service.working_folder == Path("/var/lib/chairlift-small")
    environment = service.environment
    assert environment["HOME"] == "/var/lib/chairlift-small"
    for name in ("CHAIRLIFT_CACHE", "HF_HOME", "MLX_PTX_CACHE_DIR", "CUDA_CACHE_PATH"):
        assert environment[name].startswith("/var/cache/chairlift-small/")


def test_the_operators_folders_and_variables_are_carried() -> None:
    environment = {
        "HF_HOME": "/models/hub",
        "CHAIRLIFT_CACHE": "/models/lift",
        "HF_HUB_OFFLINE": "1",
        "HF_TOKEN": "hf_secret",
        "SHELL": "/bin/zsh",
    }
    found = defined(Platform.LAUNCHD, environment=environment, variables={"OMP_NUM_THREADS": "4"}).environment
    assert (found["HF_HOME"], found["CHAIRLIFT_CACHE"]) == ("/models/hub", "/models/lift")
    assert (found["HF_HUB_OFFLINE"], found["OMP_NUM_THREADS"]) == ("1", "4")
    assert not {"HF_TOKEN", "SHELL"} & set(found)


def test_a_preloaded_library_is_carried_on_linux_alone() -> None:
    environment = {"LD_PRELOAD": "libfast.so", "CUDA_VISIBLE_DEVICES": "1"}
    who = Person("ada", 1000, 1000, Path("/home/ada"))
    assert (
        defined(Platform.SYSTEMD, who=who, environment=environment).environment["LD_PRELOAD"] == "libfast.so"
    )
    found = defined(Platform.LAUNCHD, environment=environment).environment
    assert "LD_PRELOAD" not in found and found["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize("name", ["HF_TOKEN", "CHAIRLIFT_API_KEY", "db_password", "MY_SECRET"])
def test_no_secret_by_a_variable(name: str) -> None:
    with pytest.raises(ServiceFault, match=name):
        defined(Platform.LAUNCHD, variables={name: "x"})


def test_what_cannot_be_written_as_a_variable() -> None:
    with pytest.raises(ServiceFault, match="'A'"):
        defined(Platform.LAUNCHD, variables={"A": "1\n2"})


@pytest.mark.parametrize("platform", Platform)
@pytest.mark.parametrize("text", ["a\rUser=root", "a\x07", "a\udcff", "a\x7f"])
def test_what_would_read_otherwise_is_not_written(platform: Platform, text: str) -> None:
    with pytest.raises(ServiceFault, match="control character or is no UTF-8"):
        defined(platform, "--served-model-name", text)
    with pytest.raises(ServiceFault, match="control character or is no UTF-8"):
        defined(platform, environment={"HF_ENDPOINT": text})


def test_an_end_that_may_take_for_ever_is_no_services() -> None:
    with pytest.raises(ServiceFault, match="--drain-timeout"):
        defined(Platform.SYSTEMD, "--drain-timeout", "inf")


@pytest.mark.parametrize(("drain", "stop_s"), [("0", 180), ("30", 180), ("120", 180), ("600", 660)])
def test_stopping_may_take_longer_than_the_drain(drain: str, stop_s: int) -> None:
    assert defined(Platform.LAUNCHD, "--drain-timeout", drain).stop_s == stop_s


@pytest.mark.parametrize("never", ["0", "inf"])
def test_without_a_watchdog_the_supervisor_has_none(never: str) -> None:
    assert defined(Platform.SYSTEMD, "--watchdog", never).watchdog_s == 0


@pytest.mark.parametrize(("port", "low"), [("0", False), ("80", True), ("1023", True), ("1024", False)])
def test_low_ports(port: str, low: bool) -> None:
    assert defined(Platform.SYSTEMD, "--port", port).low_port is low


def test_a_file_of_settings_is_handed_to_a_systems_unit(tmp_path: Path) -> None:
    file = tmp_path / "lift.toml"
    file.write_text("port = 1\n")
    named = ("--config", str(file))
    assert defined(Platform.SYSTEMD, *named, system=True, who=None).credentials == (
        Credential("config", file),
    )
    assert defined(Platform.SYSTEMD, *named).credentials == ()
    assert defined(Platform.LAUNCHD, *named, system=True).credentials == ()


def test_files_of_secrets_that_the_settings_name_are_handed_over(tmp_path: Path) -> None:
    """The service's user could not read them where they are."""
    keys = [tmp_path / "alice", tmp_path / "bob"]
    for path in (*keys, tmp_path / "chain.pem"):
        path.touch(0o600)
    file = tmp_path / "lift.toml"
    file.write_text(
        f"api_key_file = ['{keys[0]}', '{keys[1]}']\nssl_certfile = '{tmp_path / 'chain.pem'}'\nport = 1\n"
    )
    named = ("--config", str(file))
    service = defined(Platform.SYSTEMD, *named, system=True, who=None)
    assert service.serve == (
        *(*named, "--api-key-file", str(keys[0]), "--api-key-file", str(keys[1])),
        *("--ssl-certfile", str(tmp_path / "chain.pem")),
    )
    assert (
        "-- --config %d/config --api-key-file %d/api-key-file --api-key-file %d/api-key-file-2 "
        "--ssl-certfile %d/ssl-certfile\n"
    ) in unit(service)
    assert defined(Platform.SYSTEMD, *named).serve == named


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that everybody may enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_what_a_user_without_anything_can_read(folder: Path) -> None:
    open_, closed = folder / "open", folder / "closed"
    for each in (open_, closed):
        each.mkdir()
        (each / "model").mkdir(mode=0o755)
    closed.chmod(0o700)
    program = ("/bin/sh",)

    def service(*serve: str, **changes: object) -> ServiceDefinition:
        given = {"system": True, "user": None, "home": Path("/"), "working_folder": Path("/"), **changes}
        return ServiceDefinition("x", program, serve, **given)  # type: ignore[arg-type]

    assert unreadable(service("--model", str(open_ / "model"))) is None
    fault = unreadable(service("--model", str(closed / "model")))
    assert fault is not None and f"because of {closed}." in fault
    assert unreadable(service("--model", str(closed / "model"), user="ada")) is None
    assert unreadable(service("--model", str(closed / "model"), system=False)) is None
    assert unreadable(service("--model", "org/name")) is None


def test_homebrew_pythons_are_named_by_what_outlives_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cellar = tmp_path / "Cellar" / "chairlift" / "0.1.0" / "libexec" / "bin"
    cellar.mkdir(parents=True)
    (cellar / "python").touch()
    monkeypatch.setattr("sys.executable", str(cellar / "python"))
    assert interpreter() == str(cellar / "python")
    (tmp_path / "opt").mkdir()
    (tmp_path / "opt" / "chairlift").symlink_to(tmp_path / "Cellar" / "chairlift" / "0.1.0")
    assert interpreter() == str(tmp_path / "opt" / "chairlift" / "libexec" / "bin" / "python")


def test_people() -> None:
    assert person("root").uid == 0
    with pytest.raises(ServiceFault, match="no user nobody-of-this-name"):
        person("nobody-of-this-name")
    assert operator({"SUDO_USER": "ada"}) == "ada"
    assert operator({"SUDO_USER": "root"}) is operator({}) is None
