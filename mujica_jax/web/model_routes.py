"""All routes of a server with a model. Their modules need JAX."""

from fastapi import APIRouter

from mujica_jax.web import ask
from mujica_jax.web.health import health_router
from mujica_jax.web.openai import routes as openai_routes
from mujica_jax.web.served import ServedModels


def model_routers(served: ServedModels) -> list[APIRouter]:
    """Return the routes of the page that asks, of OpenAI's interface, and of health and metrics."""
    return [
        ask.router(served),
        openai_routes.router(served.policy, served.agent),
        health_router(served),
    ]
