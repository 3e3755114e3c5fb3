"""The commands that the laboratory adds to `snapkv`."""

SUMMARIES = {
    "eval": "Compare methods on a task: needles, RULER, LongBench, retrieval, turns, lm-eval.",
    "bench": "Measure time and memory.",
    "study": "Repeat an observation of the paper.",
    "medusa": "Heads that draft tokens.",
}
"""The first line of each command's help, which lists the commands without importing them."""
