"""The ids of the tokens to come, which methods that look at tokens are told."""

from torch import Tensor

from snapkv.errors import CacheMismatchError, InvalidTypeError


def require_ids(token_ids: object) -> None:
    """Refuse anything but a (B, N) tensor of integers.

    Raises:
        InvalidTypeError: it is something else.
    """
    if isinstance(token_ids, Tensor) and token_ids.ndim == 2 and not token_ids.is_floating_point():
        return
    got = f"{token_ids!r} of type {type(token_ids).__name__}"
    if isinstance(token_ids, Tensor):
        got = f"a {token_ids.dtype} tensor of shape {tuple(token_ids.shape)}"
    raise InvalidTypeError(
        f"token_ids: expected a (batch, tokens) tensor of integers, got {got}; pass the input_ids "
        "of the next forward pass"
    )


def require_announced(
    coming: tuple[int, Tensor] | None, seen_tokens: int, shape: tuple[int, int], policy: str
) -> None:
    """Refuse tokens whose ids were not announced, where the policy looks at them.

    Args:
        coming: after how many tokens which ids were announced, or None.
        seen_tokens: how many the cache has seen.
        shape: rows and tokens of the forward pass.
        policy: the method's name.

    Raises:
        CacheMismatchError: they were not, or others were.
    """
    begin, ids = (None, None) if coming is None else coming
    if ids is None or begin != seen_tokens or ids.shape != shape:
        told = "none" if ids is None or begin != seen_tokens else f"those of {tuple(ids.shape)}"
        raise CacheMismatchError(
            f"token_ids: expected the ids of the next {shape[0]} x {shape[1]} tokens, since "
            f"{policy} looks at tokens, got {told}; call cache.expect_tokens(input_ids) before "
            "model(input_ids, ...), or use model.generate"
        )
