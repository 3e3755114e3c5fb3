"""`snapkv serve` in a process of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_STARTED = 600  # seconds; a busy machine takes minutes


class Server:
    """The demo model over HTTP, until the end of the ``with`` block.

    Args:
        folder: where its output goes.
        options: of `snapkv serve`, behind those that the tests share.
        model: what to serve.
        longest: of a prompt and its answer.
        command: in place of `snapkv serve` and the model.
        environment: variables beside those of this process.
    """

    def __init__(
        self,
        folder: Path | str,
        *options: str,
        model: str = "demo",
        longest: int = 2048,
        command: Sequence[str] = (),
        **environment: str,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = Path(folder) / "server.log"
        shared = ["--dtype", "float32", "--max-model-len", str(longest), "--block-size", "32"]
        shared += ["--kv-cache-memory-bytes", "300M", "--enforce-eager"]
        shared += ["--port", str(self.port)]
        if model != "demo":  # which is called so without being told
            shared += ["--served-model-name", "demo"]
        start = command or (sys.executable, "-m", "snapkv_app", "serve", model)
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environment}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*start, *shared, *options],
                stdout=log,
                stderr=log,
                env=os.environ | own,
                start_new_session=True,
            )

    def __enter__(self) -> "Server":
        deadline = time.monotonic() + _STARTED
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended: {self.output()[-20_000:]}")
            try:
                self.get("/health")
                return self
            except OSError:
                time.sleep(1)
        self.__exit__()
        raise RuntimeError(f"the server did not start: {self.output()[-20_000:]}")

    def __exit__(self, *error: object) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)
            try:
                self.process.wait(timeout=60)
                return
            except subprocess.TimeoutExpired:
                continue

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """Status and text of the answer to a JSON body."""
        text = json.dumps({"model": "demo", **body}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, text, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode()

    def metric(self, name: str, **labels: str) -> float:
        """A metric's value, summed over the labels that are not given."""
        from prometheus_client.parser import text_string_to_metric_families

        samples = [
            sample
            for family in text_string_to_metric_families(self.get("/metrics"))
            for sample in family.samples
        ]
        return sum(
            sample.value
            for sample in samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def client(self, **options: Any) -> Any:
        import openai

        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", timeout=300, max_retries=0, **options
        )
