"""GET /healthz and GET /metrics."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CollectorRegistry, generate_latest

from mujica_jax.inference.counters import LiveCounters
from mujica_jax.inference.generator import PolicyGenerator
from mujica_jax.web.served import ServedModels


def health_router(served: ServedModels) -> APIRouter:
    """Return the two routes."""
    router = APIRouter()
    registry = CollectorRegistry()
    background = served.background
    # A generator of an endpoint has counters of another kind.
    if isinstance(background.generator, PolicyGenerator):
        # A collector needs only a method `collect`.
        registry.register(LiveCounters(lambda: background.statistics))  # pyright: ignore[reportArgumentType]

    @router.get("/healthz")
    def health() -> JSONResponse:
        if not background.is_live:
            return JSONResponse({"error": "the server is stopping: ask another one"}, 503)
        return JSONResponse(
            {
                "status": "ok",
                "model": served.name,
                "under_way": background.under_way,
                "capacity": background.capacity,
            }
        )

    @router.get("/metrics")
    def metrics() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(registry).decode())

    return router
