"""What the device's memory can do, and what a token needs of it."""

import torch
from transformers import PreTrainedModel

from snapkv_lab.measure.timing import spent_on

_COPIED_BYTES = {"cuda": 2**31, "cpu": 2**28}
_ROUNDS = 10


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy reads and writes, the best of several."""
    size = _COPIED_BYTES.get(device.type, 2**28)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [spent_on(lambda: target.copy_(source)).wall_ms for _ in range(_ROUNDS)]
    return 2 * size / (min(times) / 1000)


def least_ms_per_token(model: PreTrainedModel, cache_bytes: int, bytes_per_second: float) -> float:
    """The time to read every weight and that much of a cache once.

    Of the embedding only a row is read, unless the output projection shares its matrix.
    """
    weights = sum(parameter.nbytes for parameter in model.parameters())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or embedding.weight is not head.weight:
        weights -= embedding.weight.nbytes
    return float(1000 * (weights + cache_bytes) / bytes_per_second)
