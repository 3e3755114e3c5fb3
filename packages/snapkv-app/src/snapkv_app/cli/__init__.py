"""The command line of `snapkv`, with one module for each command."""

from snapkv_app.cli.entry import main

__all__ = ["main"]

SUMMARIES = {
    "demo": "Ask about the source of Python's gzip module, from a compressed and from the full "
    "cache.",
    "ask": "Answer a question about documents, from a cache smaller than they are.",
    "generate": "Continue a text, from a cache smaller than it is.",
    "chat": "Answer questions about documents, one after another, in one small cache.",
    "inspect": "Write a page that shows the answers, the kept tokens and who voted for them.",
    "plan": "Estimate the memory of a long prompt and what compression gains, without the weights.",
    "policies": "List the methods with their parameters and defaults.",
    "config": "Show the defaults that the environment or a file sets for options.",
    "serve": "Serve a model over HTTP with vLLM, from a compressed, unquantized cache.",
    "library": "Read documents once, then ask about them with `snapkv ask --library`.",
}
"""The first line of the help of each command, so that they are listed without being imported."""
