"""`GET /health`: the process lives and its loop turns. `GET /health/ready`: send it requests."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from chairlift.engine.config import EngineStats
from chairlift.server.context import Context, context_of
from chairlift.server.errors import APIError
from chairlift.server.payload import PayloadResponse

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """503 where a step does not come back: the loop is alive, the device is not."""
    context = context_of(request)
    state = {"status": _status(context), **_steps(context)}
    if (refusal := _stalled(context, state)) is not None:
        return refusal
    return PayloadResponse(state)


def _stalled(context: Context, state: dict[str, object]) -> Response | None:
    """The answer where a step does not come back; `state` is what `_steps` says."""
    stalled_s = state["stalled_s"]
    assert isinstance(stalled_s, float)
    if stalled_s <= context.settings.wedge_after_s:
        return None
    message = f"The model has been in one step for {stalled_s:.0f} seconds."
    return _unavailable({**state, "status": "stalled"}, message)


def _steps(context: Context) -> dict[str, object]:
    """Of all models together: steps, and batches of texts, which may stall as steps do."""
    running = waiting = 0
    stalled_s, busy = 0.0, False
    ages: list[float] = []
    for engine in context.models.engines:
        stats = engine.stats()
        running, waiting = running + stats.running, waiting + stats.waiting
        stalled_s = max(stalled_s, stats.stalled_s)
        if isinstance(stats, EngineStats):
            busy = busy or stats.busy
            ages += [] if stats.last_step_age_s is None else [stats.last_step_age_s]
        else:
            busy = busy or bool(stats.running or stats.waiting)
    last = min(ages, default=None)
    return {
        "busy": busy,
        "running": running,
        "waiting": waiting,
        "last_step_age_s": last,
        "stalled_s": stalled_s,
    }


@router.head("/health/ready", include_in_schema=False)
@router.get("/health/ready")
async def ready(request: Request) -> Response:
    """200 once the models of the start are loaded and have decoded a real token, until the drain begins, and
    while steps come back."""
    context = context_of(request)
    status = _status(context)
    if status != "ok":
        return _unavailable({"status": status}, f"The server is not ready: {status}.")
    if (refusal := _stalled(context, _steps(context))) is not None:
        return refusal
    return PayloadResponse({"status": "ready"})


def _status(context: Context) -> str:
    if context.models.draining:
        return "draining"
    return "ok" if context.models.ready else "loading"


def _unavailable(state: dict[str, object], message: str) -> Response:
    error = APIError(503, message, kind="server_error", code="unavailable")
    return PayloadResponse({**state, **error.envelope()}, error.status)
