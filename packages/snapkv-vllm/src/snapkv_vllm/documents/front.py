"""Documents on vLLM's own server: the routes, and requests that name a document.

The routes are put onto the server's application, after its check of API keys. Requests meet their
document where vLLM renders them.
"""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.routing import APIRoute

from snapkv.errors import SnapKVError
from snapkv_vllm.documents.catalogue import PATH
from snapkv_vllm.documents.engine import ServerEngine
from snapkv_vllm.documents.library import ServedLibrary
from snapkv_vllm.documents.prompts import Prompts, Render
from snapkv_vllm.documents.protocol import DOCUMENT
from snapkv_vllm.documents.shared import SharedDocuments
from snapkv_vllm.metrics import Metrics
from snapkv_vllm.names import XARGS, status_of
from snapkv_vllm.settings import ServingSettings
from snapkv_vllm.streams import Message, Send
from snapkv_vllm.visits import EVERYBODY, Visit, current


class FrontEnd:
    """The documents of one server."""

    def __init__(self, app: Any, settings: ServingSettings) -> None:
        sharing = settings.sharing
        assert sharing is not None
        self._prompts = Prompts(app.state)
        self._counts = Metrics(model_name=app.state.openai_serving_models.model_name())
        self._documents = SharedDocuments(
            ServerEngine(app.state.engine_client, settings),
            self._prompts,
            self._counts,
            ServedLibrary(Path(sharing.library)) if sharing.library else None,
        )
        self._across_keys = sharing.across_keys
        self._join_in(app.state.online_renderer)
        app.include_router(_router(self._documents, self._tenant))

    def _tenant(self) -> str:
        return EVERYBODY if self._across_keys else current().tenant

    def counting(self, visit: Visit, send: Send) -> Send:
        """What sends a response, and counts it where it answers from a document."""

        async def send_and_count(message: Message) -> None:
            answers = message["type"] == "http.response.start" and message["status"] == 200
            if answers and visit.tokens_not_read:
                self._counts.count("document_requests")
                self._counts.count("document_tokens_not_read", visit.tokens_not_read)
            await send(message)

        return send_and_count

    def _join_in(self, renderer: Any) -> None:
        """Have vLLM's renderer put a document in front of the requests that name one."""

        def joining(kind: str, render: Render) -> Render:
            async def render_joined(request: Any, **options: Any) -> Any:
                visit, named = current(), (getattr(request, XARGS) or {}).get(DOCUMENT)
                if named is None:
                    return await render(request, **options)
                standing = self._documents.named(self._tenant(), named)
                try:
                    document = await visit.until_answered.enter_async_context(standing)
                    made = await self._prompts.render_after(document, request, kind, render)
                except SnapKVError as error:
                    status = HTTPStatus(status_of(error))
                    return renderer.create_error_response(str(error), status.phrase, status)
                prompts = len(request.prompt) if kind == "prompt" else 1
                visit.tokens_not_read = prompts * len(document.prefix.token_ids)
                return made

            return render_joined

        renderer.render_completion = joining("prompt", renderer.render_completion)
        renderer.render_chat = joining("messages", renderer.render_chat)


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


def _router(documents: SharedDocuments, tenant: Callable[[], str]) -> APIRouter:

    async def register(body: dict[str, Any]) -> dict[str, Any]:
        return (await documents.register(tenant(), body)).described

    async def every() -> list[dict[str, Any]]:
        return await documents.listed(tenant())

    async def one(name: str) -> dict[str, Any]:
        listed = (each for each in await documents.listed(tenant()) if each["name"] == name)
        return next(listed, None) or documents.catalogue.find(tenant(), name).described

    async def delete(name: str) -> Response:
        await documents.delete(tenant(), name)
        return Response(status_code=204)

    router = APIRouter(prefix=PATH, route_class=Route)
    router.add_api_route("", register, methods=["POST"], status_code=201)
    router.add_api_route("", every, methods=["GET"])
    router.add_api_route("/{name:path}", one, methods=["GET"])
    router.add_api_route("/{name:path}", delete, methods=["DELETE"], status_code=204)
    return router
