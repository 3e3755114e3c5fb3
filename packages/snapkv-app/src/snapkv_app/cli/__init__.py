"""The command line: one file per command."""

from snapkv_app.cli.entry import main

__all__ = ["main"]

SUMMARIES = {
    "demo": "Ask about the source of Python's gzip module, from a compressed and from the full "
    "cache.",
    "ask": "Answer a question about documents, from a cache smaller than they are.",
    "generate": "Continue a text, from a cache smaller than it is.",
    "chat": "Answer questions about documents, one after another, in one small cache.",
    "inspect": "Show on one page what was kept of documents, who voted for it, and the answers.",
    "plan": "Estimate a long prompt's memory and what compression gains, from the "
    "configuration alone.",
    "policies": "List the methods with their parameters and defaults.",
    "config": "Show the defaults that the environment or a file sets for options.",
    "serve": "Serve a model over HTTP with vLLM, from a compressed, unquantized cache.",
    "library": "Read documents once, then ask about them with `snapkv ask --library`.",
}
"""The first line of each command's help, to list commands without importing them."""
