"""`snapkv serve`: vLLM's OpenAI-compatible server with compressed prompts."""

from typing import Annotated

import typer

from snapkv.cli import interrupts
from snapkv.errors import InvalidArgumentError
from snapkv.validation import DEFAULT, require_int


def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hub id, folder, GGUF file, or demo")
    ],
    policy: Annotated[
        str, typer.Option(help="snapkv, streaming-llm or tova; default: snapkv with fading")
    ] = DEFAULT,
    budget: Annotated[
        int, typer.Option(help="Tokens kept per head and layer; 0: only where a request asks")
    ] = 1024,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Parameter of the method, as kernel_size=13"
        ),
    ] = None,
    protect_first: Annotated[
        int, typer.Option(help="First tokens of every prompt that stay, such as a system message")
    ] = 0,
) -> None:
    """Serve a model over HTTP with vLLM, from a compressed cache.

    Behind MODEL goes any option of `vllm serve`, such as --max-model-len 32768.
    """
    if model.startswith("-"):
        raise InvalidArgumentError(
            f"model: expected the model before all options, got {model}; write for instance "
            "snapkv serve demo --budget 1024"
        )
    require_int("budget", budget, minimum=0)
    require_int("protect_first", protect_first, minimum=0)

    from snapkv.app.models import place_of
    from snapkv.cli.policy import typed_assignments  # imports torch
    from snapkv.policies import SnapKV
    from snapkv.policies.default import default_parameters
    from snapkv.serving import ServingSettings
    from snapkv.serving.server import serve as run_server

    parameters = typed_assignments(policy, set_ or [])
    if policy == DEFAULT:
        policy, parameters = SnapKV.name, default_parameters(parameters)
    settings = ServingSettings(
        policy=policy, budget=budget, parameters=parameters, protect_first=protect_first
    )
    interrupts.started()
    run_server(place_of(model), settings, context.args)
