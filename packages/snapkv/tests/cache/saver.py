"""Run as a program: for every line it reads, a child that saves caches until it is killed."""

import os
import sys
import time

import torch

from snapkv import CompressedCache, SnapKV
from tests.families import call, random_ids, tiny_model


def filled(model, tokens):
    """A cache with offloaded tokens, so that its file is of some size."""
    cache = CompressedCache(model, SnapKV(40, window_size=8), recall="host")
    call(model, cache, random_ids(8, tokens))
    return cache


def main(path):
    """Print how long a save takes, then the pid of a child for every line; they save in turn."""
    torch.set_num_threads(1)  # a child could wait for other threads, which a fork leaves behind
    model = tiny_model("llama")
    caches = [filled(model, 400), filled(model, 300)]
    start = time.perf_counter()
    caches[1].save(path)
    _say(time.perf_counter() - start)
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            while True:
                for cache in caches:
                    cache.save(path)
        _say(child)
        os.waitpid(child, 0)
        _say("gone")


def _say(word):
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
