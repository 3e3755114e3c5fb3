"""The example of a conversation with a server, run as its user runs it."""

import subprocess
import sys
from pathlib import Path

from tests.serving.vllm.servers import Server

EXAMPLE = Path(__file__).parents[5] / "examples" / "chat_client.py"


def test_the_client_of_the_examples_is_answered_from_compressed_prompts(served, tmp_path):
    with Server(tmp_path, "--budget", "1024", model=served.folder) as server:
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), f"{server.url}/v1"], capture_output=True, text=True
        )
        compressed = server.metric("snapkv:requests_total", outcome="compressed")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("tokens read, at most 128 kept)") == 2
    assert compressed == 2
