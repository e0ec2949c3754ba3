"""TLS by the server itself."""

from __future__ import annotations

import asyncio
import signal
import ssl
from pathlib import Path

import httpx
import openai
import pytest
import trustme

from chairlift.server.security.tls import TLSFault, TLSSettings, load_certificate, make_context
from tests.server.security.keyring import ALICE, bearer
from tests.server.test_serve import serving


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def written(authority: trustme.CA, folder: Path, name: str = "127.0.0.1") -> TLSSettings:
    certificate = authority.issue_cert(name)
    chain, key = folder / "chain.pem", folder / "key.pem"
    chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    certificate.private_key_pem.write_to_path(key)
    return TLSSettings(chain, key)


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def test_a_server_speaks_tls_and_takes_a_new_certificate(authority: trustme.CA, tmp_path: Path) -> None:
    tls = written(authority, tmp_path)
    environment = {
        "CHAIRLIFT_SSL_CERTFILE": str(tls.certfile),
        "CHAIRLIFT_SSL_KEYFILE": str(tls.keyfile),
        "CHAIRLIFT_API_KEY": ALICE,
    }
    with serving(10, "short", **environment) as process:
        assert process.url.startswith("https://127.0.0.1:")
        trust = trusting(authority)
        with httpx.Client(verify=trust, base_url=process.url) as client:
            assert client.get("/health/ready").status_code == 200
            assert client.get("/v1/models").status_code == 401
        with (
            httpx.Client(verify=trust) as http,
            openai.OpenAI(base_url=f"{process.url}/v1", api_key=ALICE, http_client=http) as sdk,
        ):
            stream = sdk.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "Hi"}], stream=True
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == "short"
        with pytest.raises(httpx.TransportError):
            httpx.get(process.url.replace("https", "http") + "/health")
        with pytest.raises(httpx.ConnectError, match="(?i)certificate"):
            httpx.get(process.url + "/health")

        other = trustme.CA()
        written(other, tmp_path)
        process.signal(signal.SIGHUP)
        with httpx.Client(verify=trusting(other), base_url=process.url) as client:
            while True:
                try:
                    assert client.get("/v1/models", headers=bearer(ALICE)).status_code == 200
                    break
                except httpx.ConnectError:
                    pass
        process.signal()
        code, err = process.end()
    assert code == 0 and "The certificate was read again." in err and "Traceback" not in err


def test_old_versions_are_refused(authority: trustme.CA, tmp_path: Path) -> None:
    assert make_context(written(authority, tmp_path)).minimum_version == ssl.TLSVersion.TLSv1_2


def test_one_file_may_hold_both(authority: trustme.CA, tmp_path: Path) -> None:
    path = tmp_path / "both.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(path)
    make_context(TLSSettings(path))


def test_an_encrypted_key_takes_its_password(authority: trustme.CA, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as form

    tls = written(authority, tmp_path)
    assert tls.keyfile is not None
    key = form.load_pem_private_key(tls.keyfile.read_bytes(), None)
    pem = key.private_bytes(
        form.Encoding.PEM, form.PrivateFormat.PKCS8, form.BestAvailableEncryption(b"open sesame")
    )
    tls.keyfile.write_bytes(pem)
    make_context(TLSSettings(tls.certfile, tls.keyfile, "open sesame"))
    for password in (None, "", "wrong"):
        with pytest.raises(TLSFault, match="password is wrong"):
            make_context(TLSSettings(tls.certfile, tls.keyfile, password))
    assert "sesame" not in repr(TLSSettings(tls.certfile, tls.keyfile, "open sesame"))


def test_what_cannot_be_used_is_named(authority: trustme.CA, tmp_path: Path) -> None:
    tls = written(authority, tmp_path)
    (tmp_path / "other").mkdir()
    other = written(authority, tmp_path / "other")
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    for settings, named in (
        (TLSSettings(tmp_path / "absent.pem"), "absent.pem cannot be read"),
        (TLSSettings(tls.certfile, tmp_path / "absent.pem"), "absent.pem cannot be read"),
        (TLSSettings(text), "text.pem hold no certificate"),
        (TLSSettings(tls.certfile), "hold no certificate with its private key"),
        (TLSSettings(tls.certfile, other.keyfile), "key.pem hold no certificate"),
    ):
        with pytest.raises(TLSFault, match=named):
            make_context(settings)


async def test_half_a_change_leaves_the_old_certificate(authority: trustme.CA, tmp_path: Path) -> None:
    tls = written(authority, tmp_path)
    context = make_context(tls)
    assert tls.keyfile is not None
    tls.keyfile.write_text("being written")
    with pytest.raises(TLSFault):
        load_certificate(context, tls)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(authority))
        assert await reader.read() == b""
        writer.close()
