"""Where documents are registered, listed, compared and deleted, behind vLLM's API keys."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import FileResponse

from snapkv.errors import SnapKVError
from snapkv_vllm.documents.catalogue import PATH, SharedDocument
from snapkv_vllm.documents.refused import status_of
from snapkv_vllm.documents.shared import SharedDocuments


def router_of(documents: SharedDocuments, tenant_of: Callable[[Any], str]) -> APIRouter:
    """The routes.

    Args:
        documents: of the server.
        tenant_of: says whose a request is by its ASGI scope.
    """

    async def register(body: dict[str, Any], request: Request) -> dict[str, Any]:
        with as_http_errors():
            return _described(await documents.register(tenant_of(request.scope), body))

    async def every(request: Request) -> list[dict[str, Any]]:
        with as_http_errors():
            await documents.restored()
        return [_described(one) for one in documents.catalogue.of(tenant_of(request.scope))]

    async def one(name: str, request: Request) -> dict[str, Any]:
        with as_http_errors():
            await documents.restored()
            return _described(documents.catalogue.find(tenant_of(request.scope), name))

    async def file(name: str, request: Request) -> Response:
        with as_http_errors():
            path = documents.file(tenant_of(request.scope), name)
        return FileResponse(path, filename=path.name, media_type="application/octet-stream")

    async def report(name: str, body: dict[str, Any], request: Request) -> dict[str, Any]:
        with as_http_errors():
            return await documents.report(tenant_of(request.scope), name, body)

    async def delete(name: str, request: Request) -> Response:
        with as_http_errors():
            await documents.delete(tenant_of(request.scope), name)
        return Response(status_code=204)

    router = APIRouter(prefix=PATH)
    router.add_api_route("", register, methods=["POST"], status_code=201)
    router.add_api_route("", every, methods=["GET"])
    router.add_api_route("/{name}", one, methods=["GET"])
    router.add_api_route("/{name}/file", file, methods=["GET"], response_class=FileResponse)
    router.add_api_route("/{name}/report", report, methods=["POST"])
    router.add_api_route("/{name}", delete, methods=["DELETE"], status_code=204)
    return router


@contextmanager
def as_http_errors() -> Iterator[None]:
    """Have FastAPI answer with errors of this package, while a body is read or later."""
    try:
        yield
    except SnapKVError as error:
        raise HTTPException(status_of(error), detail=str(error)) from error


def _described(document: SharedDocument) -> dict[str, Any]:
    return {
        "name": document.name,
        "kind": document.kind,
        "tokens": len(document.token_ids),
        "kept_tokens": document.kept_tokens,
        "bytes": document.bytes,
        "requests": document.requests,
        "created": int(document.created),
        "last_used": int(document.last_used),
    }
