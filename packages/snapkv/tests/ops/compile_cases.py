"""Compile every kernel to machine code for GPUs that are not installed here.

Run as a process of its own: triton is told of a device before any kernel is asked for, and a launch
compiles and ends there.
"""

import contextlib
import itertools
import re
import subprocess
import sys
import tempfile

import torch

# Compute capability, and the shared memory that a program may take there, in bytes.
DEVICES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
MOST_SPILLED_BYTES = 128  # of the 1,020 that a thread has in registers
SHAPES = {  # B, Hq, Hkv, W, T, D
    "llama-3.1-8b": (1, 32, 8, 32, 32768, 128),
    "lwm-7b": (2, 32, 32, 32, 16384, 128),
    "qwen2.5-7b": (1, 28, 4, 64, 32768, 128),
    "smollm2-135m": (4, 9, 3, 32, 8192, 64),
    "head_dim 256": (1, 16, 8, 32, 8192, 256),
    "head_dim 256, wide groups": (1, 4, 1, 32, 8192, 256),
    "head_dim 192": (1, 32, 16, 64, 8192, 192),
    "head_dim 80": (1, 32, 32, 16, 4096, 80),
}


class Device:
    """What triton asks a driver when it compiles."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_device(self):
        return self.capability

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def resources(cubin):
    """Bytes per thread that did not fit into registers, as the disassembler says."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    return int(re.search(r"STACK:(\d+)", said)[1]) + int(re.search(r"LOCAL:(\d+)", said)[1])


def run_all(dtype):
    """Ask for every kernel; on this device each is compiled and none runs."""
    from snapkv.ops import AttentionStates, Fading, ScoreOptions
    from snapkv.ops.votes import triton, triton_largest

    reduces = itertools.cycle(("mean", "max", "none"))  # three for every two kinds of a shape
    for shape, extras in itertools.product(SHAPES.values(), (False, True)):
        B, Hq, Hkv, W, T, D = shape
        queries = torch.empty(B, Hq, W, D, dtype=dtype)
        keys = torch.empty(B, Hkv, T, D, dtype=dtype)
        options, pads = ScoreOptions(scaling=1.0), None
        if extras:
            options = ScoreOptions(scaling=1.0, softcap=50.0, sink_logits=torch.zeros(Hq))
            pads = torch.zeros(B, dtype=torch.int64)
        given = AttentionStates(queries, keys, options, pads)
        reduced = {"group_reduce": next(reduces)}
        triton.window_votes(given, **reduced)
        if dtype != torch.float32 or D <= 128:  # refused
            triton_largest.largest_votes(given, Fading(0.9), prefix_tokens=T - 16, **reduced)
        for asked in (queries[:, :, :1], queries):
            run_ragged(asked, Hkv, options)
            run_coded(asked, Hkv, options)
    triton.fade_votes(torch.empty(1, 8, 32768), 0.9)


def run_ragged(queries, kv_heads, options):
    from snapkv.ops import RaggedLayout, TailInputs
    from snapkv.ops.ragged import triton

    B, D = queries.shape[0], queries.shape[-1]
    layout = RaggedLayout(((700,) * kv_heads,) * B, queries.device)
    kept = queries.new_empty(700 * kv_heads * B, D)
    tail = queries.new_empty(B, kv_heads, 64, D)
    triton.ragged_attention(TailInputs(queries, tail, tail, options), kept, kept, layout)


def run_coded(queries, kv_heads, options):
    from snapkv.ops import BlockLayout, TailInputs, encode_all
    from snapkv.ops.codes import triton, triton_coding

    B, D = queries.shape[0], queries.shape[-1]
    if queries.dtype == torch.float32 and D > 64:
        return  # refused
    layout = BlockLayout((((96,) * kv_heads,) * B,), 32, queries.device)
    blocks = torch.zeros(len(layout.heads), 32, D, dtype=queries.dtype)
    keys, values = encode_all([(blocks, 4, "tokens"), (blocks, 4, "channels")])
    for bits, along in itertools.product((4, 8), ("tokens", "channels")):
        triton_coding.encode(blocks[..., : D // 32 * 32], bits, along)
    tail = queries.new_empty(B, kv_heads, 64, D)
    triton.coded_attention(TailInputs(queries, tail, tail, options), keys, values, layout)


def compiled(capability, dtype):
    """Every kernel that was compiled for a device: name, bytes spilled, bytes shared."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(Device(capability))
    kernels, launch = {}, JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **options):
        kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
        kernels[kernel.hash] = self.fn.__name__, kernel
        return kernel

    JITFunction.run, device_of = compile_only, torch.cuda.device_of
    torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
    try:
        run_all(dtype)
    finally:
        JITFunction.run, torch.cuda.device_of = launch, device_of
    for name, kernel in kernels.values():
        yield name, resources(kernel.asm["cubin"]), kernel.metadata.shared


KERNELS = {
    "_sum_exponentials", "_add_up", "_fade", "_total", "_carry", "_sum_faded", "_largest",
    "_attend_codes", "_encode", "_attend_split", "_put_together",
}  # fmt: skip

if __name__ == "__main__":
    names, capability = set(), int(sys.argv[1])
    for dtype in (torch.bfloat16, torch.float32):
        for name, spilled, shared in compiled(capability, dtype):
            names.add(name)
            assert spilled <= MOST_SPILLED_BYTES, f"{name}, {dtype}: {spilled} bytes spilled"
            assert shared <= DEVICES[capability], f"{name}, {dtype}: {shared} bytes shared"
    assert names == KERNELS, names
