"""The routes of a server without a model, in the place of those in `model_routes.py`."""

from typing import Any

from fastapi import APIRouter

from mujica_jax.web.run_library import UnknownNameError


def router() -> APIRouter:
    """Return routes that say that there is no model."""
    routes = APIRouter()

    @routes.get("/api/ask")
    def choices() -> dict[str, Any]:
        return {"model": None, "agents": [], "sources": [], "examples": []}

    @routes.post("/api/ask")
    def ask() -> None:
        raise UnknownNameError("this server has no model: start it with `mujica serve RUN`")

    @routes.get("/healthz")
    def health() -> dict[str, Any]:
        return {"status": "ok", "model": None}

    return routes
