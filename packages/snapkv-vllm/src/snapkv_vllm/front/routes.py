"""The HTTP routes that list and delete the sessions of a server."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.routing import APIRoute

from snapkv.errors import SnapKVError
from snapkv_vllm.admission.names import (
    CONFLICT,
    NOT_FOUND,
    SESSIONS_METHOD,
    describe,
    status_of,
    wrong,
)
from snapkv_vllm.front.request_context import add_tenant, record_refusals

PATH = "/v1/snapkv/sessions"


class Route(APIRoute):
    """A route that answers an error of this package with the HTTP status that belongs to
    the error.
    """

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:
        """Return FastAPI's handler of the route, wrapped so that a `SnapKVError` becomes an
        HTTPException with the status of the error.
        """
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            """Call the handler of the route, and return its response.

            Raises:
                HTTPException: the handler has raised a `SnapKVError`, which decides the status.
            """
            try:
                return await handle(request)
            except SnapKVError as error:
                raise HTTPException(status_of(error), detail=str(error)) from error

        return answer


def _require_deleted(name: str, answers: Sequence[dict[str, int]]) -> None:
    """Check that the engines have deleted a session.

    Args:
        name: the name that the client has sent.
        answers: the result of `SessionStore.delete_session` from every engine.

    Raises:
        RefusedError: requests of the session are running in an engine (status 409; other engines
            may have deleted their histories), or there is no such session (404).
    """
    if any(one["requests"] for one in answers):
        remedy = "Wait until these requests have finished, and delete the session then"
        raise wrong("session", "some requests of the session are still running", remedy, CONFLICT)
    if not any(one["histories"] for one in answers):
        problem = f"there is no session with the name {describe(name)} for this API key"
        raise wrong("session", problem, f"Use GET {PATH} to list the sessions", NOT_FOUND)


def router(client: Any) -> APIRouter:
    """Return the routes with which a client lists and deletes the sessions of its tenant.

    GET `PATH` answers with the list of `SessionStore.list_sessions` from all engines. DELETE of
    `PATH`, a slash and the name answers with status 204, or as `_require_deleted` says.

    Args:
        client: vLLM's client of the engines, whose schedulers must have sessions.
    """
    core = client.engine_core

    async def call_engines(method: str, argument: str) -> list[Any]:
        send, request = core._call_utility_async, (SESSIONS_METHOD, method, [argument])
        return await asyncio.gather(*(send(*request, engine=one) for one in core.core_engines))

    async def list_sessions() -> list[dict[str, Any]]:
        answers = await call_engines("list_sessions", add_tenant(""))
        return [one for answer in answers for one in answer]

    async def delete(name: str) -> Response:
        answers = await call_engines("delete_session", add_tenant(name))
        with record_refusals():
            _require_deleted(name, answers)
        return Response(status_code=204)

    routes = APIRouter(prefix=PATH, route_class=Route)
    routes.add_api_route("", list_sessions, methods=["GET"])
    routes.add_api_route("/{name:path}", delete, methods=["DELETE"], status_code=204)
    return routes
