"""Images from the web, from a web server on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import httpx
import pytest

from chairlift.server.media.errors import MediaError
from chairlift.server.media.fetch import Fetched, Fetcher, _JudgedTransport
from chairlift.server.settings import MediaSettings
from tests.server.media.host import CUT, MORE, answer, host, ok, redirect

OPEN = MediaSettings(allow_private=True, max_bytes=100, timeout_s=5.0)


class Names:
    """Addresses of names, and how often each was asked for."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, name: str, port: int) -> Sequence[str]:
        self.asked.append((name, port))
        return self.answers.pop(0)


def fetched(url: str, settings: MediaSettings = OPEN) -> asyncio.Future[Fetched]:
    return asyncio.ensure_future(Fetcher(settings).fetch(url))


async def refusal(url: str, settings: MediaSettings = OPEN) -> str:
    with pytest.raises(MediaError) as caught:
        await Fetcher(settings).fetch(url)
    return caught.value.message


async def test_bytes_and_type() -> None:
    async with host(lambda path: ok(b"x" * 100, "Content-Type: image/png")) as web:
        assert await fetched(web.url("/a?b=c")) == Fetched(b"x" * 100, "image/png")
        [(path, headers)] = web.requests
    assert path == "/a?b=c" and headers["host"] == f"127.0.0.1:{web.port}"
    assert headers["accept-encoding"] == "identity" and headers["user-agent"] == "chairlift"
    assert not {"cookie", "authorization", "referer"} & headers.keys()


async def test_an_answer_without_a_length_or_type() -> None:
    async with host(
        lambda path: answer("200 OK", b"3\r\nabc\r\n0\r\n\r\n", "Transfer-Encoding: chunked")
    ) as web:
        assert await fetched(web.url()) == Fetched(b"abc", None)


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "127.1", "0x7f000001", "2130706433", "0"])
async def test_this_machine_is_not_public(name: str) -> None:
    async with host(lambda path: ok(b"secret")) as web:
        message = await refusal(web.url(name=name), replace(OPEN, allow_private=False))
        assert message.startswith("is not at a public address")
        assert web.connections == 0


async def test_ipv6_is_judged_too() -> None:
    for literal in ("[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[64:ff9b::7f00:1]"):
        message = await refusal(f"http://{literal}/", replace(OPEN, allow_private=False))
        assert message.startswith("is not at a public address"), literal


async def test_a_name_is_resolved_once_and_its_judged_address_connected_to() -> None:
    """A name that answers differently the second time (DNS rebinding) is not asked a second time."""
    names = Names(["127.0.0.1"], ["127.0.0.2"])
    judged: list[str] = []

    def judge(address: str) -> bool:
        judged.append(address)
        return True

    async with host(lambda path: ok(b"abc")) as web:
        fetcher = Fetcher(replace(OPEN, allow_private=False), resolve=names, judge=judge)
        assert (await fetcher.fetch(web.url("/cat", name="cat.example"))).data == b"abc"
        assert web.requests[0][1]["host"] == f"cat.example:{web.port}"
    assert names.asked == [("cat.example", web.port)]
    assert judged == ["127.0.0.1"]


async def test_one_address_that_is_not_public_refuses_the_name() -> None:
    names = Names(["127.0.0.1", "10.0.0.1"])
    async with host(lambda path: ok(b"abc")) as web:
        fetcher = Fetcher(
            replace(OPEN, allow_private=False), resolve=names, judge=lambda address: address == "127.0.0.1"
        )
        with pytest.raises(MediaError, match="public"):
            await fetcher.fetch(web.url(name="cat.example"))
        assert web.connections == 0


async def test_the_next_address_is_tried_where_one_does_not_answer() -> None:
    async with host(lambda path: ok(b"abc")) as web:
        # Nothing listens on this port of 127.0.0.2.
        fetcher = Fetcher(OPEN, resolve=Names(["127.0.0.2", "127.0.0.1"]))
        assert (await fetcher.fetch(web.url(name="cat.example"))).data == b"abc"


async def test_tls_checks_the_name_and_not_the_address() -> None:
    sent: list[httpx.Request] = []

    class Inner(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            sent.append(request)
            return httpx.Response(200)

    names = Names(["8.8.8.8"], ["2606:4700::1"])
    async with httpx.AsyncClient(transport=_JudgedTransport(Inner(), names, lambda address: True)) as client:
        await client.get("https://cat.example/a")
        await client.get("https://cat.example:444/a")
    assert [str(request.url) for request in sent] == ["https://8.8.8.8/a", "https://[2606:4700::1]:444/a"]
    assert [request.headers["host"] for request in sent] == ["cat.example", "cat.example:444"]
    assert [request.extensions["sni_hostname"] for request in sent] == ["cat.example"] * 2
    assert names.asked == [("cat.example", 443), ("cat.example", 444)]


async def test_redirects_are_followed() -> None:
    answers = {"/": redirect("/b"), "/b": redirect("c"), "/c": ok(b"abc")}
    async with host(lambda path: answers[path]) as web:
        assert (await fetched(web.url())).data == b"abc"
        assert [path for path, _ in web.requests] == ["/", "/b", "/c"]


async def test_too_many_redirects() -> None:
    async with host(lambda path: redirect(path + "x")) as web:
        assert "more than 3 redirects" in await refusal(web.url())
        assert len(web.requests) == 4


async def test_a_redirect_is_judged() -> None:
    names = Names(["127.0.0.1"], ["127.0.0.2"])
    async with host(lambda path: redirect("http://inside.example/")) as web:
        fetcher = Fetcher(
            replace(OPEN, allow_private=False), resolve=names, judge=lambda address: address == "127.0.0.1"
        )
        with pytest.raises(MediaError, match="public"):
            await fetcher.fetch(web.url(name="outside.example"))
    assert [name for name, _ in names.asked] == ["outside.example", "inside.example"]


@pytest.mark.parametrize("to", ["file:///etc/passwd", "ftp://127.0.0.1/a", "gopher://127.0.0.1/"])
async def test_a_redirect_out_of_http(to: str) -> None:
    async with host(lambda path: redirect(to)) as web:
        assert "http" in await refusal(web.url())


async def test_the_body_of_a_redirect_is_not_read() -> None:
    answers = {"/": redirect("/b", "Content-Length: 1000000") + b"x" + MORE, "/b": ok(b"abc")}
    async with host(lambda path: answers[path]) as web:
        assert (await fetched(web.url())).data == b"abc"


async def test_more_bytes_than_allowed() -> None:
    answers = {
        "/announced": answer("200 OK", MORE, "Content-Length: 101"),
        "/not": answer("200 OK", b"65\r\n" + b"x" * 101 + MORE, "Transfer-Encoding: chunked"),
    }
    async with host(lambda path: answers[path]) as web:
        for path in answers:
            assert await refusal(web.url(path)) == "is larger than 100 bytes"


async def test_more_time_than_allowed() -> None:
    answers = {"/head": MORE, "/body": answer("200 OK", b"x" + MORE, "Content-Length: 50")}
    async with host(lambda path: answers[path]) as web:
        for path in answers:
            message = await refusal(web.url(path), replace(OPEN, timeout_s=0.2))
            assert message == "could not be fetched within 0.2 seconds"


async def test_a_name_that_takes_long_to_resolve() -> None:
    async def never(name: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return ()

    with pytest.raises(MediaError, match=r"within 0\.05 seconds"):
        await Fetcher(replace(OPEN, timeout_s=0.05), resolve=never).fetch("http://cat.example/")


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (answer("404 Not Found", b"", "Content-Length: 0"), "its host answered 404"),
        (answer("204 No Content", b""), "its host answered 204"),
        (answer("302 Found", b"", "Content-Length: 0"), "its host answered 302"),
        (ok(b"abc", "Content-Encoding: gzip"), "in an encoding that was not asked for"),
        (b"SSH-2.0-OpenSSH\r\n\r\n" + CUT, "RemoteProtocolError"),
        (answer("200 OK", b"x" + CUT, "Content-Length: 5"), "RemoteProtocolError"),
        (CUT, "RemoteProtocolError"),
    ],
)
async def test_answers_that_are_no_image(reply: bytes, message: str) -> None:
    async with host(lambda path: reply) as web:
        assert message in await refusal(web.url())


async def test_urls_that_lead_nowhere() -> None:
    async with host(lambda path: ok(b"")) as web:
        port = web.port
    assert "ConnectError" in await refusal(f"http://127.0.0.1:{port}/")
    assert "invalid URL" in await refusal("http://[::1/")
    assert "invalid URL" in await refusal("http://127.0.0.1:99999999/")
    assert "credentials" in await refusal(f"http://me:secret@127.0.0.1:{port}/")
    assert "invalid URL" in await refusal("http:///cat.png")

    async def unknown(name: str, port: int) -> Sequence[str]:
        raise OSError("no such host")

    with pytest.raises(MediaError, match="no address"):
        await Fetcher(OPEN, resolve=unknown).fetch("http://cat.example/")


async def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with host(lambda path: ok(b"direct")) as web, host(lambda path: ok(b"proxied")) as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url())
        assert (await fetched(web.url())).data == b"direct"
        assert proxy.connections == 0
