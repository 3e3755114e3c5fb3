"""What vLLM calls in each of its processes (entry point ``vllm.general_plugins``)."""


def register() -> None:
    """Make the compressed block spec known; nothing else happens until an engine asks for it.

    A process of a server that this package has started ends with its parent from here on; by vLLM's
    own command, from where its worker, its scheduler or its web application is made.
    """
    from snapkv_vllm.blocks import register_spec
    from snapkv_vllm.lifetime import end_with_parent, own_folder
    from snapkv_vllm.versions import supported_version

    if own_folder():
        end_with_parent()
    if supported_version():
        register_spec()
