"""Settings of the server's defences."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift.server.configuration.fields import is_secret
from chairlift.server.configuration.read import ConfigurationError, read
from chairlift.server.configuration.serving import server_settings
from chairlift.server.configuration.written import written
from chairlift.server.security.keys import KeySources
from chairlift.server.security.rates import RateSettings
from chairlift.server.security.settings import ConnectionLimits, SecuritySettings
from chairlift.server.security.tls import TLSSettings
from tests.server.security.keyring import ALICE, BOB, ROOT

NONE = Path("/dev/null")


def test_what_is_asked_arrives(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    environment = {
        "CHAIRLIFT_API_KEY": f"alice:{ALICE}, {BOB}",
        "CHAIRLIFT_API_KEY_FILE": str(file),
        "CHAIRLIFT_ADMIN_KEY": ROOT,
        "CHAIRLIFT_CORS_ORIGIN": "HTTPS://a.example,http://localhost:3000",
        "CHAIRLIFT_SSL_KEYFILE_PASSWORD": "hush",
        "CHAIRLIFT_REQUESTS_PER_MINUTE": "60",
        "CHAIRLIFT_TOKENS_PER_MINUTE": "9000",
        "CHAIRLIFT_CONCURRENT_REQUESTS": "4",
        "CHAIRLIFT_FORWARDED_ALLOW_IPS": "127.0.0.1,10.0.0.0/8",
    }
    flags = {
        "allowed_host": ["LLM.example.org"],
        "insecure": True,
        "metrics_public": True,
        "prefix_cache_per_key": True,
        "header_timeout": 1.5,
        "header_limit": 2,
        "send_timeout": 3,
        "keep_alive_timeout": 4,
        "body_timeout": 5,
        "ssl_certfile": file,
        "ssl_keyfile": file,
    }
    outcome = read(flags, NONE, environment)
    assert server_settings(outcome.configuration).security == SecuritySettings(
        keys=KeySources((f"alice:{ALICE}", BOB), (file,), (ROOT,)),
        rates=RateSettings(60, 9000, 4),
        connection=ConnectionLimits(
            head_s=1.5, head_bytes=2048, stall_s=3, idle_s=4, proxies=("127.0.0.1", "10.0.0.0/8")
        ),
        prefix_cache_per_key=True,
        tls=TLSSettings(file, file, "hush"),
        insecure=True,
        metrics_public=True,
        cors_origins=("https://a.example", "http://localhost:3000"),
        allowed_hosts=("llm.example.org",),
    )
    assert server_settings(outcome.configuration).body_patience_s == 5
    shown = written(outcome) + repr(outcome) + repr(server_settings(outcome.configuration))
    assert not any(secret in shown for secret in (ALICE, BOB, ROOT, "hush"))


def test_without_settings_there_are_no_keys() -> None:
    assert server_settings(read({}, NONE, {}).configuration).security == SecuritySettings()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"api_key": ["hush me"]}, "Invalid value for --api-key: a key consists of"),
        ({"admin_key": ["-x:" + ALICE]}, "--admin-key: a key's name has"),
        ({"cors_origin": ["example.org"]}, "--cors-origin[0]: 'example.org' is no origin"),
        ({"allowed_host": ["a:80"]}, "--allowed-host[0]: 'a:80' is no host name"),
        ({"forwarded_allow_ips": ["proxy"]}, "--forwarded-allow-ips[0]: 'proxy' is no address"),
        ({"ssl_keyfile": __file__}, "--ssl-keyfile: It needs --ssl-certfile"),
        ({"ssl_keyfile_password": "hush"}, "--ssl-keyfile-password: It needs --ssl-certfile"),
        ({"api_key_file": ["/nowhere"]}, "--api-key-file[0]: The file '/nowhere' does not exist"),
    ],
)
def test_what_cannot_be(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read(flags, NONE, {})
    assert message in str(refused.value)
    assert "hush" not in str(refused.value) and ALICE not in str(refused.value)


def test_a_file_with_secrets_is_nobody_elses(tmp_path: Path) -> None:
    path = tmp_path / "lift.toml"
    path.write_text(f"port = 1\napi_key = ['{ALICE}']")
    path.chmod(0o640)
    with pytest.raises(ConfigurationError) as refused:
        read({}, path, {})
    assert f"chmod 600 {path}" in str(refused.value) and "0640" in str(refused.value)
    path.chmod(0o600)
    assert [key.get_secret_value() for key in read({}, path, {}).configuration.api_key] == [ALICE]
    path.write_text("port = 1")
    path.chmod(0o644)
    assert read({}, path, {}).configuration.port == 1


def test_which_are_secret() -> None:
    assert is_secret("api_key") and is_secret("admin_key") and is_secret("ssl_keyfile_password")
    assert not is_secret("api_key_file") and not is_secret("port") and not is_secret("no_such_setting")
