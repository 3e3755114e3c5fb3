"""Scores of kvpress's presses for tensors of this environment.

Runs with the Python of kvpress's environment and imports nothing of snapkv: `-I THIS PRESS IN OUT`.
IN and OUT are safetensors; the press's keyword arguments are JSON under "options" in IN's notes.
"""

import json
import sys

from kvpress import LagKVPress
from safetensors import safe_open
from safetensors.torch import save_file

PRESSES = {
    "lagkv": lambda states, options: LagKVPress(**options).score(
        None, None, states["keys"], states["values"], None, {}
    ),
}

if __name__ == "__main__":
    press, given, found = sys.argv[1:]
    with safe_open(given, "pt") as file:
        states = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 # no dict
        options = json.loads(file.metadata()["options"])
    save_file({"scores": PRESSES[press](states, options).float().contiguous()}, found)
