"""What vLLM calls in each of its processes (entry point ``vllm.general_plugins``)."""


def register() -> None:
    """Make the compressed block spec known; nothing else happens until an engine asks for it."""
    from snapkv.serving.blocks import register_spec
    from snapkv.serving.versions import supported_version

    if supported_version():
        register_spec()
