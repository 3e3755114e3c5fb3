"""What is said to those whose document or request cannot be served, and with which status."""

from snapkv.errors import InvalidArgumentError, OutOfMemoryError, OutputError, SnapKVError

UNKNOWN, TAKEN, BUSY, NO_ROOM = 404, 409, 503, 507


class RefusedError(InvalidArgumentError):
    """Something about documents that is refused.

    Args:
        message: argument, expected, got, remedy.
        status: of the HTTP response.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def status_of(error: SnapKVError) -> int:
    """The status of the HTTP response to an error of this package."""
    if isinstance(error, RefusedError):
        return error.status
    return NO_ROOM if isinstance(error, OutOfMemoryError | OutputError) else 400
