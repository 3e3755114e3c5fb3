"""Checks of an environment in which the packages have just been installed."""

import sys
from collections.abc import Sequence
from pathlib import Path

from tests.release.environments import Environment, NotReleasableError, run
from tests.serving.vllm.servers import Server

EXAMPLE = Path(__file__).parent / "example"
MOST_TIMES_TYPER = 3
IMPORTS = 5
TEXT = (
    "The ferry to Runde leaves at seven. The key of the boathouse hangs behind the red door. " * 40
)
Smoke = tuple[str, str, str]
"""A command line, what it is to print, and what is typed."""

QUESTION = ("--question", "Where does the key of the boathouse hang?")
QUESTION += ("--answer-start", "The key of the boathouse hangs behind the")
_FEW = ("--budget", "128", "--max-new-tokens", "8")
_OPTIONS = {
    "ask": (*QUESTION, *_FEW),
    "inspect": (*QUESTION, *_FEW),
    "chat": _FEW,
    "generate": _FEW,
}
OWN_COMMANDS = (
    ("policies", "snapkv", ""),
    ("plan --model llama-3.1-8b --context 32k", "compressed", ""),
    ("ask text.txt", "red door", ""),
    ("generate text.txt", "", ""),
    ("chat text.txt", "", "Where does the key of the boathouse hang?\n"),
    ("inspect text.txt --output page.html", "", ""),
    ("library add text.txt --to texts.library", "text.txt", ""),
    ("library list texts.library", "text.txt", ""),
    ("ask --library texts.library", "red door", ""),
)
LAB_COMMANDS = (
    ("eval needle --lengths 512 --depths 1 --limit 1 --results needle", "needle", ""),
    ("bench decode --lengths 256 --budget 128", "256", ""),
    ("study position --help", "position", ""),
    ("medusa train --help", "medusa", ""),
)


_COMPRESSED = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from snapkv import CompressedCache, SnapKV

sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
cache = CompressedCache(model.eval(), SnapKV(budget=48))
ids = torch.randint(3, 64, (1, 200))
model.generate(ids, cache=cache, max_new_tokens=1, do_sample=False)
report = cache.report()
print(f"{report.kept_tokens:.0f} of {report.seen_tokens}")
"""


_IMPORTED = """
import sys, time
start = time.process_time()
import snapkv_app.cli.app
snapkv_app.cli.app.program("ask")
print(time.process_time() - start, *sys.modules)
"""
_TYPER = """
import time
start = time.process_time()
import typer.rich_utils
print(time.process_time() - start)
"""


def require_command_line(here: Environment) -> float:
    """Raise unless the command line starts quickly and imports nothing heavy.

    The time is compared with that of importing typer and rich, which print the help, because
    seconds say nothing of a machine that is slow or has other work to do. The processes take
    turns, and of each kind the fastest counts.

    Returns:
        Processor time that importing the command line takes, as a multiple of typer's.

    Raises:
        NotReleasableError: the help does not name the command `ask`, a heavy package is imported,
            or the time is more than `MOST_TIMES_TYPER` times that of typer.
    """
    if "ask" not in here.run("snapkv", "--help"):
        raise NotReleasableError("snapkv --help: expected the command ask, got none")
    ours, typers = [], []
    for _ in range(IMPORTS):
        seconds, *modules = here.run("python", "-c", _IMPORTED).split()
        ours.append(float(seconds))
        typers.append(float(here.run("python", "-c", _TYPER).split()[0]))
    early = sorted({"torch", "transformers", "numpy", "snapkv_lab"} & set(modules))
    if early:
        raise NotReleasableError(f"snapkv ask: expected none of {', '.join(early)}")
    if (ratio := min(ours) / min(typers)) > MOST_TIMES_TYPER:
        raise NotReleasableError(
            f"snapkv ask: expected to be imported in at most {MOST_TIMES_TYPER} times as long as "
            f"typer, got {ratio:.1f} times ({min(ours):.2f} s)"
        )
    return ratio


def require_library(here: Environment) -> None:
    """Check that the library works alone: loading all of its public names loads no other package of
    ours.

    Raises:
        NotReleasableError: another package is loaded, or a name cannot be.
    """
    code = "import snapkv, sys; [getattr(snapkv, name) for name in snapkv.__all__]; "
    loaded = here.run("python", "-c", code + "print(*sys.modules)").split()
    if others := {"snapkv_app", "snapkv_lab", "snapkv_vllm", "typer", "rich"} & set(loaded):
        raise NotReleasableError(f"snapkv.__all__: expected the library alone, got {others}")


def require_answer(here: Environment) -> None:
    """Check that a model of transformers generates from a compressed cache, without a warning.

    Raises:
        NotReleasableError: it does not, or another number of tokens is kept.
    """
    if "48 of 200" not in (said := here.run("python", "-W", "error", "-c", _COMPRESSED)):
        raise NotReleasableError(f"CompressedCache: expected 48 of 200 tokens, got {said.strip()}")


def require_other_packages(here: Environment) -> None:
    """Check that commands of packages that are not installed say which package to install.

    Raises:
        NotReleasableError: a command says something else.
    """
    for command, package in (("eval", "snapkv-lab"), ("serve", "snapkv-vllm")):
        said = here.run("snapkv", command, "demo", status=2)
        if f"pip install {package}" not in said:
            raise NotReleasableError(
                f"snapkv {command}: expected pip install {package}, got {said}"
            )


def require_commands(here: Environment, smokes: Sequence[Smoke]) -> None:
    """Run commands of the application with the demo model, and check their output.

    Args:
        here: the environment.
        smokes: for each command its arguments, a text that its output must contain, and the text of
            standard input.

    Raises:
        NotReleasableError: a command fails, or its output does not contain the text.
    """
    (here.folder / "text.txt").write_text(TEXT, "utf-8")
    for command, wanted, typed in smokes:
        said = here.run(
            "snapkv", *command.split(" "), *_OPTIONS.get(command.split()[0], ()), typed=typed
        )
        if wanted not in said:
            raise NotReleasableError(f"snapkv {command}: expected {wanted!r}, got {said.strip()!r}")


def require_experiments(here: Environment) -> None:
    """Check that the experiments for a GPU run without a checkout and without git, by one part of
    them in its small form.

    Raises:
        NotReleasableError: the part fails, or prints something else.
    """
    small = ("-m", "snapkv_lab.experiments", "gpu", "--small", "--part", "reading")
    if "adakv" not in (said := here.run("python", *small)):
        raise NotReleasableError(f"experiments gpu: expected adakv, got {said.strip()!r}")


def require_server(here: Environment) -> None:
    """Check that the installed plugin serves the demo model over HTTP, and compresses the prompt.

    Raises:
        NotReleasableError: the server does not start, the answer is wrong, or the number of kept
            tokens is not plausible.
    """
    command = [str(here.folder / "bin" / "snapkv"), "serve", "demo", "--budget", "96"]
    own = {"PYTHONPATH": "", "SNAPKV_CACHE_DIR": str(here.folder / "cache")}
    body = {"prompt": f"{TEXT}\n{QUESTION[1]} {QUESTION[3]}", "max_tokens": 4}
    try:
        with Server(here.folder, command=command, **own) as server:
            status, said = server.post("/v1/completions", body)
            counted = server.get("/metrics").splitlines()
    except RuntimeError as error:  # what a server says that does not start
        raise NotReleasableError(str(error)) from None
    kept = sum(
        float(line.split()[-1])
        for line in counted
        if line.startswith("snapkv:prompt_tokens_kept_total")
    )
    if status != 200 or "red door" not in said:
        raise NotReleasableError(f"snapkv serve: expected 'red door', got {status} {said}")
    if not 0 < kept <= 128:  # whole blocks
        raise NotReleasableError(f"snapkv serve: expected some 96 tokens kept, got {kept:.0f}")


def require_types(here: Environment) -> None:
    """Check that mypy accepts a project that uses the installed package, and finds a wrong
    argument.

    Raises:
        NotReleasableError: mypy finds an error in the project, or none in the wrong call.
    """
    mypy = [sys.executable, "-m", "mypy", "--config-file", str(EXAMPLE / "mypy.ini")]
    command = [*mypy, "--python-executable", str(here.python)]
    run([*command, str(EXAMPLE / "answer.py")], here.folder)
    wrong = here.folder / "wrong.py"
    wrong.write_text("import snapkv\n\nsnapkv.CompressedCache(None, 'much')\n", "utf-8")
    try:
        run([*command, str(wrong)], here.folder)
    except NotReleasableError as error:
        if "[arg-type]" in str(error):
            return
        raise
    raise NotReleasableError("mypy: expected an error for a policy that is a string, got none")
