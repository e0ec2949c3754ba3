"""The responses of one app: those in the making and those that are kept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress

from chairlift.server.errors import APIError, invalid, shorten
from chairlift.server.payload import Payload
from chairlift.server.responses.answering import Answering, unpack, without_output
from chairlift.server.responses.caller import Caller
from chairlift.server.responses.database import Stored
from chairlift.server.responses.store import HEARTBEAT_S, ResponseStore
from chairlift.server.settings import ResponsesSettings

logger = logging.getLogger("chairlift.server")

CANCEL_S = 5.0
"""Seconds that a cancelled response gets to end by itself; a reader that is stuck may hold it."""
CLOSE_S = 5.0
"""Seconds that answers in the background get to be kept when the server stops."""
RUNNING = ("queued", "in_progress")


def not_found(id: str) -> APIError:
    return APIError(404, f"Response with id {shorten(id)!r} not found.", param="response_id")


class Responses:
    """On the event loop."""

    def __init__(self, settings: ResponsesSettings) -> None:
        self.store = ResponseStore(settings)
        self._running: dict[str, Answering] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._heart: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Ends what is answered in the background, which keeps what it has, then closes the store."""
        for answering in list(self._running.values()):
            answering.stream.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        if self._heart is not None:
            self._heart.cancel()
            with suppress(asyncio.CancelledError):
                await self._heart
        await self.store.close()

    # -- in the making

    def enter(self, answering: Answering) -> None:
        """From now on it can be retrieved and cancelled, until `leave`."""
        self._running[answering.id] = answering

    def leave(self, answering: Answering) -> None:
        """Its reader has read it to the end, or is gone."""
        answering.abandon()
        self._running.pop(answering.id, None)

    async def start(self, answering: Answering) -> None:
        """Answer in the background. It is kept at once, so that it is known to whoever asks for it.

        Raises: APIError: 500 where it cannot be kept.
        """
        store = self.store
        if store.shared:
            await store.seen()
            if self._heart is None:
                self._heart = asyncio.create_task(self._beat(), name="chairlift responses")
        stored = Stored(
            without_output(answering.snapshot),
            answering.conversation,
            (),
            owner=store.owner,
            tenant=answering.tenant,
        )
        if not await store.put(answering.id, stored):
            raise invalid("input is larger than the store of responses.", "input", "invalid_value")
        self.enter(answering)
        task = asyncio.create_task(self._answer(answering), name=f"chairlift {answering.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, answering: Answering) -> None:
        try:
            async for event in answering.events():
                answering.append(event)
        except Exception:
            logger.exception("a response in the background failed")
        finally:
            self.leave(answering)
            answering.append(None)

    async def _beat(self) -> None:
        """Tells other processes on the same file that what is answered here is still being answered."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            with suppress(APIError):  # logged by the store
                await self.store.seen()

    # -- by id

    def _answered(self, id: str, caller: Caller) -> Answering | None:
        answering = self._running.get(id)
        return answering if answering is not None and caller.reaches(answering.tenant) else None

    def _making(self, id: str, caller: Caller) -> Answering | None:
        """Unless nothing of it is to be kept: then it is seen by nobody but its client."""
        answering = self._answered(id, caller)
        return answering if answering is not None and answering.store is not None else None

    async def retrieve(self, id: str, caller: Caller) -> Payload:
        """Raises: APIError: 404."""
        if (answering := self._making(id, caller)) is not None:
            return answering.snapshot
        return (await self._stored(id, caller)).response

    async def find(self, id: str, caller: Caller, *, use: bool = False) -> Stored | None:
        """What is kept of it for this caller. Args: use: a request goes on from it."""
        stored = await self.store.get(id, caller, use=use) if self.store.enabled else None
        if stored is None or stored.owner is None or await self._is_answered(id, stored.owner):
            return stored
        return await self._fail(id, stored)

    async def _stored(self, id: str, caller: Caller) -> Stored:
        if (stored := await self.find(id, caller)) is None:
            raise not_found(id)
        return stored

    async def _is_answered(self, id: str, owner: str) -> bool:
        if owner == self.store.owner:
            return id in self._running
        return await self.store.is_alive(owner)

    async def _fail(self, id: str, stored: Stored) -> Stored:
        """Of a process that is gone."""
        error = {"code": "server_error", "message": "The server stopped while it was answering."}
        body = {**stored.body, "status": "failed", "error": error}
        failed = Stored(body, stored.conversation, (), tenant=stored.tenant)
        await self.store.put(id, failed, anew=False)
        return failed

    async def delete(self, id: str, caller: Caller) -> None:
        """Raises: APIError: 404."""
        running = self._making(id, caller)
        if running is not None:
            running.forget()
        deleted = await self.store.delete(id, caller) if self.store.enabled else False
        if running is None and not deleted:
            raise not_found(id)

    async def cancel(self, id: str, caller: Caller) -> Payload:
        """Raises: APIError: 404; 400 for a response that has ended otherwise; 409 for another process's."""
        if (answering := self._answered(id, caller)) is not None:
            answering.cancel()
            with suppress(TimeoutError):
                await asyncio.wait_for(answering.settled.wait(), CANCEL_S)
            answering.abandon()
            return answering.snapshot
        stored = await self._stored(id, caller)
        status = stored.body["status"]
        if status == "cancelled":
            return stored.response
        if status in RUNNING:
            raise APIError(409, "Another server answers this response; it has to be cancelled there.")
        raise invalid(f"Cannot cancel a response that is {status}.", "response_id", "invalid_value")

    async def input_items(self, id: str, caller: Caller) -> tuple[Payload, ...]:
        """Raises: APIError: 404."""
        if (answering := self._making(id, caller)) is not None:
            return answering.conversation
        return (await self._stored(id, caller)).conversation

    async def follow(self, id: str, after: int, caller: Caller) -> AsyncGenerator[Payload]:
        """Events of a response made in the background with `stream`, from the one behind `after` on.

        Raises: APIError: 404; 400 for a response whose events are not kept.
        """
        answering = self._answered(id, caller)
        if answering is not None and answering.keeps_events:
            return answering.follow(after)
        stored = None if answering is not None else await self._stored(id, caller)
        if stored is None or stored.events is None:
            raise invalid(
                "stream: events are kept of responses that were made with background and stream.",
                "stream",
                "unsupported_value",
            )
        return _replay(await asyncio.to_thread(unpack, stored.events), after)


async def _replay(events: list[Payload], after: int) -> AsyncGenerator[Payload]:
    for event in events[after + 1 :]:
        yield event
