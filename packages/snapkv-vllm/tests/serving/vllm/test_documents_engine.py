"""What the front end refuses before the engine is asked to read."""

import asyncio
from types import SimpleNamespace

import pytest

from snapkv.errors import InvalidArgumentError
from snapkv_vllm.documents.engine import ServerEngine
from snapkv_vllm.documents.sharing import Sharing
from snapkv_vllm.settings import ServingSettings

ROOM = {"block_tokens": 4, "bytes_per_token": 10, "most_tokens": 1000, "budget": 8}


class Client:
    """vLLM's client of an engine of 100 positions, which answers how much room there is."""

    model_config = SimpleNamespace(max_model_len=100)

    async def generate(self, prompt, sampling, name):
        assert sampling.extra_args == {"snapkv_room": "all"}
        yield SimpleNamespace(kv_transfer_params=ROOM)


@pytest.mark.parametrize(
    ("tokens", "budget", "found"),
    [
        (98, 1000, 960),
        (90, None, 80),
        (99, 1000, "at most 98 tokens, with room to ask and answer behind them, got 99"),
        (95, None, "positions left to repeat it at"),
        (5, None, 40),
        (13, 4, "at least 14 tokens"),
        (3, None, "at least the 4 tokens of a block"),
    ],
)
def test_a_document_that_the_engine_could_not_read_is_refused(tokens, budget, found):
    settings = ServingSettings(budget=64, sharing=Sharing())
    engine = ServerEngine(Client(), settings)
    needed = engine.bytes_of(tokens, budget=budget, instruction_tokens=5 if tokens > 13 else 7)
    if isinstance(found, int):
        assert asyncio.run(needed) == found
    else:
        with pytest.raises(InvalidArgumentError, match=found):
            asyncio.run(needed)
