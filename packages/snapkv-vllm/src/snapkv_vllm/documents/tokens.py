"""Tokens of texts and chats by vLLM's own renderer, with vLLM's own errors."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.tokenize.protocol import TokenizeCompletionRequest

from snapkv_vllm.documents.refused import RefusedError


class ServerPrompts:
    """The `Prompts` of a vLLM server.

    Args:
        state: of its FastAPI application.
    """

    def __init__(self, state: Any) -> None:
        self._renderer = state.online_renderer
        self._models = state.openai_serving_models

    def is_base_model(self, name: str) -> bool:
        """Whether a name stands for the model itself, and for no adapter."""
        return bool(self._models.is_base_model(name))

    async def tokenize(self, prompt: str | list[int], *, special_tokens: bool) -> list[int]:
        """The tokens of a text, or given ones once they are checked.

        Raises:
            RefusedError: with vLLM's own words.
        """
        request = TokenizeCompletionRequest(prompt="", add_special_tokens=special_tokens)
        with _as_refused():
            if isinstance(prompt, list):
                self._renderer.renderer.validate_token_ids(prompt, parameter="prompt")
            (made,) = await self._renderer.preprocess_completion(
                request, prompt_input=prompt, prompt_embeds=None, skip_mm_cache=True
            )
        return list(made["prompt_token_ids"])

    async def render(self, body: Mapping[str, Any]) -> list[int] | None:
        """The tokens of what a chat's body says; None for one that vLLM itself refuses.

        Raises:
            RefusedError: with vLLM's own words.
        """
        try:
            request = ChatCompletionRequest.model_validate(copy.deepcopy(dict(body)))
        except ValidationError:
            return None
        with _as_refused():
            made = await self._renderer.render_chat(request, skip_mm_cache=True)
        if isinstance(made, ErrorResponse):
            raise RefusedError(made.error.message, made.error.code)
        _, (engine_input,) = made
        if engine_input["type"] != "token":
            raise RefusedError(
                f"messages: expected text alone with a document, got {engine_input['type']} input; "
                "leave it out"
            )
        return list(engine_input["prompt_token_ids"])


@contextmanager
def _as_refused() -> Iterator[None]:
    """Turn what vLLM raises into what its endpoints answer then."""
    try:
        yield
    except Exception as error:
        said = create_error_response(error).error
        raise RefusedError(said.message, said.code) from error
