"""vLLM's own middleware, errors and renderer around a made-up engine."""

import asyncio
from types import SimpleNamespace

from snapkv_vllm.admission.settings import ServingSettings


def configured(folder):
    """vLLM's arguments and its configuration for the demo model."""
    from vllm import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    own = ["--model", folder, "--served-model-name", "demo", "--dtype", "float32"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(own)
    return args, AsyncEngineArgs.from_cli_args(args).create_engine_config()


class Client:
    """vLLM's, of an engine that says the same of every request and remembers what it was asked."""

    def __init__(self, vllm_config):
        self.vllm_config, self.asked, self.told = vllm_config, [], None
        self.engine_core = SimpleNamespace(
            core_engines=range(2), _call_utility_async=self.call_utility
        )

    async def generate(self, prompt, sampling, request_id, **options):
        self.asked.append((prompt, sampling))
        yield SimpleNamespace(kv_transfer_params=None)

    async def call_utility(self, method, *args, engine):
        self.asked.append((method, *args, engine))
        return self.told


class Site:
    """An application as vLLM makes it, whose endpoints answer with what the engine would get."""

    def __init__(
        self,
        config,
        *,
        keys=("mine", "theirs"),
        sessions=None,
    ):
        from fastapi import FastAPI
        from vllm.entrypoints.launchers.render.app_state import init_render_app_state
        from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
        from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

        from snapkv_vllm.server import SETTINGS_CHECK

        args, vllm_config = config
        self.app = FastAPI()
        asyncio.run(init_render_app_state(vllm_config, self.app.state, args))
        settings = ServingSettings(budget=64, sessions=sessions)
        own = {"api_key": list(keys), "middleware": [SETTINGS_CHECK]}
        own["additional_config"] = settings.to_config()
        self.app.state.args = type(args)(**{**vars(args), **own})
        self.client = self.app.state.engine_client = Client(vllm_config)
        self.seen = []
        self._add_endpoints()
        init_exception_handler(self.app)
        init_entrypoints_middleware(self.app.state.args, self.app, ("generate",))

    def asking(self):
        """A client, for as long as a ``with`` block."""
        from starlette.testclient import TestClient

        return TestClient(self.app)

    def _add_endpoints(self):
        from fastapi.responses import JSONResponse, StreamingResponse
        from vllm.entrypoints.anthropic.protocol import (
            AnthropicCountTokensRequest,
            AnthropicMessagesRequest,
        )
        from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
        from vllm.entrypoints.serve.engine.protocol import ErrorResponse

        renderer = self.app.state.online_renderer
        self.going_on = asyncio.Event()
        self.going_on.set()

        async def streamed():
            for _ in range(3):
                yield b"data: {}\n\n"
                await self.going_on.wait()

        async def answered(request, made):
            if isinstance(made, ErrorResponse):
                return JSONResponse(made.model_dump(), status_code=made.error.code)
            for one in made:
                async for _ in self.client.generate(one, None, "request"):
                    pass
            ids = [one["prompt_token_ids"] for one in made]
            self.seen.append((request.vllm_xargs, ids))
            if request.stream:
                return StreamingResponse(streamed(), media_type="text/event-stream")
            return JSONResponse({"ids": ids, "usage": {}})

        async def complete(request: CompletionRequest):
            return await answered(request, await renderer.render_completion(request))

        async def chat(request: ChatCompletionRequest):
            made = await renderer.render_chat(request)
            return await answered(request, made[1] if isinstance(made, tuple) else made)

        async def respond(request: ResponsesRequest):
            made = await renderer.render_responses(request)
            return await answered(request, [made.engine_input])

        async def other(body: dict):
            return body

        async def count(request: AnthropicCountTokensRequest):
            chat = AnthropicServingMessages.to_chat_completion_request(request)
            _, (made,) = await renderer.render_chat(chat)
            tokens = len(made["prompt_token_ids"])
            whole = {"original_input_tokens": tokens}
            return {"input_tokens": tokens, "context_management": whole}

        async def messages(request: AnthropicMessagesRequest):
            return await chat(AnthropicServingMessages.to_chat_completion_request(request))

        paths = {
            "completions": complete,
            "chat/completions": chat,
            "responses": respond,
            "messages": messages,
            "messages/count_tokens": count,
            "x": other,
        }
        for path, answer in paths.items():
            self.app.add_api_route(f"/v1/{path}", answer, methods=["POST"], response_model=None)
