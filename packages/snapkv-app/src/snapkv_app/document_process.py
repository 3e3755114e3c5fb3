"""Read documents in another process, so that no document can exhaust or crash this one."""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from typing import Any

from snapkv.errors import DocumentError, missing_package
from snapkv.validation import format_bytes
from snapkv_app.decoding import refused

_SECONDS = 120
"""The longest time that reading a document may take."""

_MOST_MEMORY = 2**32
"""The most bytes of memory for reading a document, if the operating system can limit them."""


class DocumentProcess:
    """A process of Python that reads documents, one after the other.

    It is started for the first document. If a document takes too much time or memory, or makes a
    library crash, the process ends, and the next document starts another one. Several threads may
    call `read`: they wait for each other.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        atexit.register(self.close)

    def close(self) -> None:
        """End the process at once, if it is running; the next `read` starts another one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def read(self, form: str, name: str, data: bytes, most: int) -> tuple[str, list[str]] | None:
        """Read a document in the other process, and wait for its text.

        Args:
            form: the form of the document: a key of `documents.READERS`, or the MIME type of an
                Office document.
            name: the name of the file, for error messages.
            data: the content of the file.
            most: the most bytes that the text may have in UTF-8.

        Returns:
            The text, and a clause for each part of the document that is not in it; None if the
            text is longer than `most`.

        Raises:
            DocumentError: the document cannot be read, or takes too much time or memory.
            MissingDependencyError: the library that reads it is not installed.
        """
        with self._lock:
            process = self._started()
            timer = threading.Timer(_SECONDS, process.kill)
            timer.start()
            answer = None
            try:
                answer = _asked(process, (form, name, len(data), most), data)
            finally:
                timer.cancel()
                if answer is None:  # or was interrupted: its answer must not be the next one's
                    self.close()
        if answer is None:
            raise refused(
                f"{name} could not be read within {_SECONDS} seconds and "
                f"{format_bytes(_MOST_MEMORY)} of memory",
                "Export the file as text or PDF, or use only a part of it",
            )
        if "missing" in answer:
            raise missing_package(f"file: reading {name}", answer["missing"])
        if "error" in answer:
            raise DocumentError(answer["error"])
        return (answer["text"], answer["losses"]) if "text" in answer else None

    def _started(self) -> "subprocess.Popen[bytes]":
        """Return the running process; start one if there is none or it has ended."""
        if self._process is None or self._process.poll() is not None:
            # One thread each, because every thread reserves memory.
            own = {"TOKIO_WORKER_THREADS": "1", "RAYON_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "snapkv_app.document_process", str(_MOST_MEMORY)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **own},
            )
        return self._process


PROCESS = DocumentProcess()
"""The process that reads all documents of this program."""


def _asked(process: "subprocess.Popen[bytes]", question: Any, data: bytes) -> dict[str, Any] | None:
    """Send a request and a document to the process, and wait for its answer.

    Args:
        process: the process.
        question: the request, which JSON can represent.
        data: the content of the document.

    Returns:
        What `_answer` returned in the process; None if the process ended before it had answered.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(question).encode() + b"\n" + data)
        process.stdin.flush()
    line = process.stdout.readline()
    return json.loads(line) if line.endswith(b"\n") else None


def _serve(most_memory: int) -> None:
    """Answer requests of `_asked` until standard input ends, with at most `most_memory` bytes.

    From now on, everything that is written to file descriptor 1 goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that the output of a library is not read as an answer
    sys.setrecursionlimit(10_000)  # for pages with deeply nested tags
    _limit_resources(most_memory)
    for line in sys.stdin.buffer:
        form, name, size, most = json.loads(line)
        answer = _answer(form, name, sys.stdin.buffer.read(size), most)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _answer(form: str, name: str, data: bytes, most: int) -> dict[str, Any]:
    """Read one document, and return the result or the error as a dict that JSON can represent.

    Returns:
        "text" and "losses", which are the two results of `DocumentProcess.read`; or "error" alone,
        the message of a DocumentError; or "missing" alone, the name of a package that is not
        installed. Empty if the text has more than `most` bytes in UTF-8.
    """
    from snapkv_app.documents import read_document

    try:
        reading = read_document(form, name, data)
    except DocumentError as error:
        return {"error": str(error)}
    except ModuleNotFoundError as error:
        return {"missing": error.name}
    text = reading.text.encode(errors="replace")  # a document may contain halves of characters
    return {"text": text.decode(), "losses": reading.losses} if len(text) <= most else {}


def _limit_resources(most_memory: int) -> None:
    """Limit the memory of this process, and prevent it from writing files.

    On Windows nothing is limited.
    """
    try:
        import resource  # not on Windows
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_DATA, (most_memory, most_memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
