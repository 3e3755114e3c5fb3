"""Scores of kvpress's presses for tensors of this environment.

Runs with the Python of kvpress's environment and imports nothing of snapkv: `-I THIS PRESS IN OUT`.
IN and OUT are safetensors; the press's keyword arguments are JSON under "options" in IN's notes.
"""

import json
import sys
from types import SimpleNamespace

import torch
from kvpress import KVzipPress, LagKVPress
from safetensors import safe_open
from safetensors.torch import save_file


def kvzip_plus(states, options):
    """Of a text in one piece and queries behind it that do not turn; they are what enters, too."""
    queries, keys, values = (states[name] for name in ("queries", "keys", "values"))
    heads, tokens, size = queries.shape[1:]
    hidden = queries.transpose(1, 2).flatten(2)
    module = SimpleNamespace(
        config=SimpleNamespace(
            num_attention_heads=heads, num_key_value_heads=keys.shape[1], hidden_size=heads * size
        ),
        head_dim=size,
        layer_idx=0,
        q_proj=lambda states: states,
        o_proj=SimpleNamespace(weight=states["output_weight"]),
    )
    press = KVzipPress(kvzip_plus_normalization=True, **options)
    press.context_length = press.end_idx = keys.shape[2] - tokens
    press.score_val = torch.zeros(1, 1, keys.shape[1], press.end_idx)
    ones = torch.ones(1, tokens, size)
    turned = {"position_embeddings": (ones, torch.zeros_like(ones))}
    press.score_kvzip(module, hidden, keys, values, None, turned)
    return press.score_val[0]


PRESSES = {
    "kvzip+": kvzip_plus,
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
