"""`GET /health`: the process lives and its loop turns. `GET /health/ready`: send it requests."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

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
    stalled_s = state["stalled_s"]
    assert isinstance(stalled_s, float)
    if stalled_s > context.settings.wedge_after_s:
        state["status"] = "stalled"
        return _unavailable(state, f"The model has been in one step for {stalled_s:.0f} seconds.")
    return PayloadResponse(state)


def _steps(context: Context) -> dict[str, object]:
    """Of steps, and of batches of texts, which may stall as steps do; rows and waiting requests are those of
    the generating model, where there is one."""
    state: dict[str, object] = {}
    stalled_s = 0.0
    if context.embedder is not None:
        batches = context.embedder.stats()
        stalled_s = batches.stalled_s
        busy = bool(batches.running or batches.waiting)
        state |= {"busy": busy, "running": batches.running, "waiting": batches.waiting}
    if context.generation is not None:
        steps = context.generation.stats()
        stalled_s = max(stalled_s, steps.stalled_s)
        state |= {"busy": steps.busy, "running": steps.running, "waiting": steps.waiting}
        state["last_step_age_s"] = steps.last_step_age_s
    return {**state, "stalled_s": stalled_s}


@router.head("/health/ready", include_in_schema=False)
@router.get("/health/ready")
async def ready(request: Request) -> Response:
    """200 once the model is loaded and has decoded a real token, until the drain begins."""
    status = _status(context_of(request))
    if status != "ok":
        return _unavailable({"status": status}, f"The server is not ready: {status}.")
    return PayloadResponse({"status": "ready"})


def _status(context: Context) -> str:
    if any(engine.draining for engine in context.engines):
        return "draining"
    return "ok" if all(engine.ready for engine in context.engines) else "loading"


def _unavailable(state: dict[str, object], message: str) -> Response:
    error = APIError(503, message, kind="server_error", code="unavailable")
    return PayloadResponse({**state, **error.envelope()}, error.status)
