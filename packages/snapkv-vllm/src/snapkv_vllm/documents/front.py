"""Documents on vLLM's own server: the routes, and requests that name a document.

The routes are put onto the server's application, behind its check of API keys. A request's body is
rewritten while the server behind that check reads it.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from snapkv_vllm.documents.catalogue import PATH, SharedDocument
from snapkv_vllm.documents.folder import DocumentFolder
from snapkv_vllm.documents.rewriting import document_of, rewritten
from snapkv_vllm.documents.routes import as_http_errors, router_of
from snapkv_vllm.documents.shared import SharedDocuments
from snapkv_vllm.documents.tenants import EVERYBODY, tenant_of
from snapkv_vllm.settings import ServingSettings

_Scope = MutableMapping[str, Any]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Visit:
    """One HTTP request, from its body to the last byte of its response.

    Args:
        documents: of the server.
        tenant: whose the request is.
        path: of the endpoint.

    Attributes:
        is_about_documents: whether the endpoint is of documents, which reads a body by its own
            names.
    """

    def __init__(self, documents: SharedDocuments, tenant: str, path: str) -> None:
        self.is_about_documents = path == PATH or path.startswith(f"{PATH}/")
        self._documents = documents
        self._tenant = tenant
        self._path = path
        self._named: SharedDocument | None = None
        self._prompts = 0
        self.until_answered = AsyncExitStack()

    async def rewritten(self, body: object) -> dict[str, Any] | None:
        """The body that goes on; None for one that names no document and stays as it is.

        Raises:
            HTTPException: the document is not there, or the request cannot stand on it.
        """
        with as_http_errors():
            name = document_of(body, self._path)
            if name is None or not isinstance(body, dict):
                return None
            standing = self._documents.named(self._tenant, name)
            self._named = await self.until_answered.enter_async_context(standing)
            changed = await rewritten(body, self._path, self._named, self._documents.prompts)
            self._prompts = len(changed["prompt"]) if self._named.kind == "prompt" else 1
            return changed

    def sending(self, send: _Send) -> _Send:
        """What sends the response, and counts it where there is one to the question."""

        async def send_and_count(message: MutableMapping[str, Any]) -> None:
            answers = message["type"] == "http.response.start" and message["status"] == 200
            if answers and self._named is not None:
                self._documents.answered(self._named, self._prompts)
            await send(message)

        return send_and_count


class FrontEnd:
    """The documents of one server.

    Args:
        app: vLLM's FastAPI application, its state filled.
        settings: the server's, which share documents.
    """

    def __init__(self, app: Any, settings: ServingSettings) -> None:
        from snapkv_vllm.documents.engine import ServerEngine
        from snapkv_vllm.documents.tokens import ServerPrompts
        from snapkv_vllm.metrics import DocumentMetrics

        engine = ServerEngine(app.state.engine_client, settings)
        counts = DocumentMetrics(app.state.openai_serving_models.model_name())
        sharing = settings.sharing
        assert sharing is not None
        folder = DocumentFolder(Path(sharing.folder)) if sharing.folder else None
        self._documents = SharedDocuments(engine, ServerPrompts(app.state), counts, folder)
        self._apart = _has_keys(app.state.args) and not sharing.across_keys
        app.include_router(router_of(self._documents, self._tenant_of))

    @asynccontextmanager
    async def visit(self, scope: _Scope) -> AsyncIterator[Visit]:
        """One HTTP request, whose document stays until its response has ended."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        visit = Visit(self._documents, self._tenant_of(scope), path)
        async with visit.until_answered:
            yield visit

    def _tenant_of(self, scope: _Scope) -> str:
        return tenant_of(scope["headers"]) if self._apart else EVERYBODY


def _has_keys(args: Any) -> bool:
    """Whether vLLM lets only those in who have an API key."""
    from vllm import envs

    return any(args.api_key or [envs.VLLM_API_KEY])
