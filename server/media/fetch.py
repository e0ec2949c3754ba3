"""An image from the web, within bounds of size, time, redirects and addresses."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from chairlift.server.media.addresses import is_public
from chairlift.server.media.errors import MediaError
from chairlift.server.settings import MediaSettings

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Addresses of a host and port. Raises: OSError."""

_HEADERS = {
    "Accept": "image/*",
    "Accept-Encoding": "identity",  # a small answer must not unpack to a large one
    "User-Agent": "chairlift",
}
_MOST_ADDRESSES = 4
"""Of one host that are tried in turn."""


@dataclass(frozen=True, slots=True)
class Fetched:
    data: bytes
    mime: str | None


class Fetcher:
    """Fetches images; one for the life of an app.

    Every host, that of every redirect too, is resolved once, all its addresses are judged, and the connection
    is made to a judged address: a name that resolves differently a moment later changes nothing. Proxies and
    credentials of the environment are not used.

    Args:
        resolve: of names to addresses; the system's by default.
        judge: whether an address may be connected to.
    """

    def __init__(
        self,
        settings: MediaSettings,
        *,
        resolve: Resolve | None = None,
        judge: Callable[[str], bool] = is_public,
    ) -> None:
        self._settings = settings
        # Threads of its own: looking up a name cannot be cancelled, and may take long.
        self._names = ThreadPoolExecutor(4, "chairlift-names")
        self._resolve = resolve or self._look_up
        self._judge = (lambda address: True) if settings.allow_private else judge
        self._tls: ssl.SSLContext | None = None

    async def fetch(self, url: str) -> Fetched:
        """Raises: MediaError."""
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return await self._fetch(url)
        except (TimeoutError, httpx.TimeoutException):
            raise MediaError(f"could not be fetched within {self._settings.timeout_s:g} seconds") from None
        except httpx.InvalidURL:
            raise MediaError("has an invalid URL") from None
        except httpx.HTTPError as error:
            raise MediaError(f"could not be fetched ({type(error).__name__})") from None

    async def _fetch(self, url: str) -> Fetched:
        if self._tls is None:
            self._tls = await asyncio.to_thread(httpx.create_ssl_context, trust_env=False)
        inner = httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False)
        transport = _JudgedTransport(inner, self._resolve, self._judge)
        async with httpx.AsyncClient(
            transport=transport, timeout=self._settings.timeout_s, trust_env=False
        ) as client:
            request = client.build_request("GET", url, headers=_HEADERS)
            # By hand: httpx would read the whole body of an answer that redirects.
            for _ in range(self._settings.max_redirects + 1):
                if not request.url.host or (request.url.port or 0) > 65535:
                    raise MediaError("has an invalid URL")
                if request.url.userinfo:
                    raise MediaError("has a URL with credentials, which is not supported")
                response = await client.send(request, stream=True)
                try:
                    if response.next_request is None:
                        return await self._read(response)
                    request = response.next_request
                finally:
                    await response.aclose()
        raise MediaError(f"could not be fetched: more than {self._settings.max_redirects} redirects")

    async def _read(self, response: httpx.Response) -> Fetched:
        limit = self._settings.max_bytes
        if response.status_code != 200:
            raise MediaError(f"could not be fetched: its host answered {response.status_code}")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise MediaError("could not be fetched: its host answered in an encoding that was not asked for")
        length = response.headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length) > limit:
            raise too_large(limit)
        chunks: list[bytes] = []
        size = 0
        async for chunk in response.aiter_raw():
            size += len(chunk)
            if size > limit:
                raise too_large(limit)
            chunks.append(chunk)
        return Fetched(b"".join(chunks), response.headers.get("content-type"))

    async def _look_up(self, host: str, port: int) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._names, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return list(dict.fromkeys(str(address[0]) for *_, address in found))


class _JudgedTransport(httpx.AsyncBaseTransport):
    """Resolves and judges the host of a request, and sends the request to the address it judged."""

    def __init__(
        self, inner: httpx.AsyncBaseTransport, resolve: Resolve, judge: Callable[[str], bool]
    ) -> None:
        self._inner = inner
        self._resolve = resolve
        self._judge = judge

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        if url.scheme not in ("http", "https"):
            raise MediaError("was redirected to a URL that is not of http or https")
        host = url.raw_host.decode("ascii").strip("[]")
        try:
            addresses = await self._resolve(host, url.port or (443 if url.scheme == "https" else 80))
        except (OSError, UnicodeError):
            addresses = ()
        if not addresses:
            raise MediaError("could not be fetched: its host has no address")
        if not all(self._judge(address) for address in addresses):
            raise MediaError(
                "is not at a public address (the operator may allow others with --allow-private-media)"
            )
        *others, last = addresses[:_MOST_ADDRESSES]
        for address in others:
            try:
                return await self._inner.handle_async_request(_at(request, address, host))
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return await self._inner.handle_async_request(_at(request, last, host))

    async def aclose(self) -> None:
        await self._inner.aclose()


def _at(request: httpx.Request, address: str, host: str) -> httpx.Request:
    """The same request to an address. The Host header and the name that TLS checks stay the host's."""
    return httpx.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,
        extensions={**request.extensions, "sni_hostname": host},
    )


def too_large(limit: int) -> MediaError:
    return MediaError(f"is larger than {limit} bytes")
