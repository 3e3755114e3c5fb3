"""Weights that a machine cannot hold are refused before any of them is read or downloaded."""

import http.server
import json
import os
import subprocess
import sys
import threading

import pytest
import torch

from snapkv.app.models import load
from snapkv.errors import OutOfMemoryError
from snapkv.plan import device_memory, require_room
from snapkv.plan.shapes import outline

GIB = 2**30
ENORMOUS = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 65536,
    "intermediate_size": 262144,
    "num_hidden_layers": 64,
    "num_attention_heads": 512,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
"""The configuration of a model of eight terabytes."""


@pytest.fixture
def memory(monkeypatch):
    def set_bytes(count):
        monkeypatch.setattr(device_memory, "total_bytes", lambda device: count)

    return set_bytes


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "total", "said"),
    [
        (torch.float32, 20 * GIB, "with dtype bfloat16 it would fit; pass that, or choose"),
        (torch.bfloat16, 13 * GIB, "Qwen/Qwen3-4B would fit, with 7.5 GiB in bfloat16; choose"),
        (torch.float32, 2 * GIB, "Qwen/Qwen3-0.6B would fit, with 1.1 GiB in bfloat16; choose"),
        (torch.bfloat16, GIB // 8, "none of which was read; choose a smaller model"),
    ],
)
def test_what_would_fit_is_said(memory, dtype, total, said):
    memory(total)
    model = outline("llama-3.1-8b", dtype=dtype)
    takes = "15.0 GiB" if dtype == torch.bfloat16 else "29.9 GiB"
    with pytest.raises(OutOfMemoryError, match=f"got {takes} in") as raised:
        require_room("it", model, CPU)
    assert said in str(raised.value)


def test_what_fits_exactly_and_what_is_not_known_pass(memory):
    model = outline("smollm2-135m", dtype=torch.float32)
    needed = 4 * sum(parameter.numel() for parameter in model.parameters())
    for total in (needed, None):
        memory(total)
        require_room("it", model, CPU)
    memory(needed - 1)
    with pytest.raises(OutOfMemoryError):
        require_room("it", model, CPU)
    model.config.quantization_config = {"quant_method": "gptq"}
    require_room("it", model, CPU)  # its bytes are not counted


def test_the_memory_of_this_machine_is_more_than_what_is_free():
    assert device_memory.free_bytes(CPU) <= device_memory.total_bytes(CPU)
    assert device_memory.total_bytes(torch.device("meta")) is None


def test_a_folder_needs_no_weights_to_be_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(ENORMOUS))
    with pytest.raises(OutOfMemoryError, match=r"of at most .* which is the memory of cpu, got"):
        load(str(tmp_path), device="cpu")


@pytest.fixture
def hub():
    """A hub on loopback with a configuration and nothing else: its address, what was asked for."""
    asked, body = [], json.dumps(ENORMOUS).encode()

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            found = self.path.endswith("config.json") and "generation" not in self.path
            self.send_response(200 if found else 404)
            self.send_header("Content-Length", str(len(body) if found else 0))
            self.send_header("ETag", '"1"')
            self.send_header("X-Repo-Commit", "0" * 40)
            self.end_headers()
            if found and self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 # what the server calls

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def test_of_a_hub_id_the_configuration_alone_is_fetched(hub, tmp_path):
    address, asked = hub
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path)}
    environment |= {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "snapkv", "generate", "-p", "Hi"),
            *("--model", "some/enormous", "--device", "cpu"),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith("snapkv: error: model: expected weights of at")
    assert " would fit, with " in done.stderr
    assert any(path.endswith("/config.json") for path in asked)
    assert not [path for path in asked if "safetensors" in path or path.endswith(".bin")]
