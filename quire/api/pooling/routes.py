"""All endpoints that pool."""

from __future__ import annotations

from fastapi import APIRouter

from quire.api.pooling import cohere, embeddings, rerank, tei
from quire.serving.models import ServerState


def router(state: ServerState) -> APIRouter:
    """A router with the endpoints of all pooling APIs."""
    routes = APIRouter()
    for module in (embeddings, rerank, cohere, tei):
        routes.include_router(module.router(state))
    return routes
