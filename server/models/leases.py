"""What a request holds until it is answered to the end, its stream included."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

KEY = "chairlift.leases"
"""Of the list in a request's scope."""


class Lease:
    """A request's use of a model, which stays loaded until `release`."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release()


class Leases:
    """Around the routes: when the application is through with a request, so is its use of a model."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held: list[Lease] = []
        scope[KEY] = held
        try:
            await self.app(scope, receive, send)
        finally:
            for lease in held:
                lease.release()


def hold(scope: Scope, lease: Lease) -> None:
    held: list[Lease] = scope[KEY]
    held.append(lease)
