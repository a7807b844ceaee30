"""The whole server as one ASGI app: every API over a host of models, behind its guards."""

from collections.abc import Sequence as SequenceOf

from fastapi import APIRouter

from minigen.server.app import create_app
from minigen.server.guards import Guards
from minigen.server.host import ModelHost
from minigen.server.keys import ApiKeys
from minigen.server.limits import Limits
from minigen.server.ollama import ollama_router

DEFAULT_LIMITS, NO_KEYS = Limits(), ApiKeys()


def create_service(
    host: ModelHost,
    limits: Limits = DEFAULT_LIMITS,
    keys: ApiKeys = NO_KEYS,
    routers: SequenceOf[APIRouter] = (),
) -> Guards:
    """An ASGI app for any server: OpenAI's API and Ollama's, and what further `routers` add.

    Raises `OptionError` for limits that contradict each other.
    """
    apis = [ollama_router(host, limits.check), *routers]
    return Guards(
        create_app(host, limits.check, apis),
        limits,
        keys,
        draining=lambda: host.draining,
        num_queued=lambda: host.num_waiting,
    )
