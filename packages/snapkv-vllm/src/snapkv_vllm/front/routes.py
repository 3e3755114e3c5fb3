"""The sessions whose histories a server holds: listed and deleted over HTTP."""

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
    printable,
    status_of,
    wrong,
)
from snapkv_vllm.front.request_context import add_tenant, record_refusals

PATH = "/v1/snapkv/sessions"


class Route(APIRoute):
    """Answers with errors of this package as vLLM does with its own."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except SnapKVError as error:
                raise HTTPException(status_of(error), detail=str(error)) from error

        return answer


def _require_deleted(name: str, answers: Sequence[dict[str, int]]) -> None:
    """Raise RefusedError unless the engines, by their answers, have deleted a session."""
    if any(one["requests"] for one in answers):
        remedy = "delete it when its requests have ended"
        raise wrong("session", "one without requests under way", "some", remedy, status=CONFLICT)
    if not any(one["histories"] for one in answers):
        asked_for, remedy = f"'{printable(name)}'", f"see GET {PATH}"
        held = "one of this key's sessions that are held"
        raise wrong("session", held, asked_for, remedy, status=NOT_FOUND)


def router(client: Any) -> APIRouter:
    """Routes that ask every engine of vLLM's client about the sessions of one tenant."""
    core = client.engine_core

    async def asked(method: str, whose: str) -> list[Any]:
        call, given = core._call_utility_async, (SESSIONS_METHOD, method, [whose])
        return await asyncio.gather(*(call(*given, engine=one) for one in core.core_engines))

    async def every() -> list[dict[str, Any]]:
        return [one for answer in await asked("list_sessions", add_tenant("")) for one in answer]

    async def delete(name: str) -> Response:
        answers = await asked("delete_session", add_tenant(name))
        with record_refusals():
            _require_deleted(name, answers)
        return Response(status_code=204)

    routes = APIRouter(prefix=PATH, route_class=Route)
    routes.add_api_route("", every, methods=["GET"])
    routes.add_api_route("/{name:path}", delete, methods=["DELETE"], status_code=204)
    return routes
