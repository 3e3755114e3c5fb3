"""What is wrong with options is said before torch is waited for."""

import json
import subprocess
import sys

import pytest

from tests.cli.commands import options_of

ASK = ("ask", "{document}", "-q", "Why?")

PROBE = """
import contextlib, io, json, sys
from snapkv.cli.app import run
sys.modules["torch"] = sys.modules["transformers"] = None  # importing them fails
found = []
for arguments in json.loads(sys.stdin.read()):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        status = run(arguments)
    found.append((status, errors.getvalue()))
print(json.dumps(found))
"""


def answered(calls):
    """Status and standard error of each call, all in one process without torch."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout)


def require_refused_at_once(calls):
    for arguments, (status, errors) in zip(calls, answered(calls), strict=True):
        assert status == 2, (arguments, errors)
        assert errors.startswith("snapkv: error: "), arguments
        assert errors.count("\n") == 1, arguments


@pytest.mark.parametrize("number", ["-1", "9" * 30])
def test_every_whole_number_of_every_command_is_checked_before_torch(document, number):
    calls = [
        command.call(option.flag, number, document=document)
        for command, option in options_of(lambda option: option.kind is int)
    ]
    assert len(calls) > 50
    require_refused_at_once(calls)


@pytest.mark.parametrize(
    "options",
    [
        ("--budget", "0"),
        ("--budget", "16"),
        ("--budget", "19"),
        ("--budget", "32", "--policy", "snapkv"),
        ("--budget", "35", "--policy", "snapkv", "--pooling", "fading"),
        ("--window-size", "2000", "--policy", "snapkv"),
        ("--budget", "auto:more=4"),
        ("--budget", "auto:lost_vote=x"),
        ("--budget", "auto:most=4.5"),
        ("--decay", "0.9", "--pooling", "max"),
        ("--decay", "0.9", "--kernel-size", "7"),
        ("--pooling", "fading", "--kernel-size", "7"),
        ("--budget", "1024", "--window-size", "2000"),
        ("--budget", "64", "--keep-ratio", "0.5"),
        ("--keep-ratio", "0"),
        ("--keep-ratio", "1.5"),
        ("--keep-ratio", "nan"),
        ("--window-size", "0"),
        ("--kernel-size", "4"),
        ("--pooling", "median"),
        ("--group-reduce", "min"),
        ("--temperature", "-1"),
        ("--max-new-tokens", "0"),
        ("--prompt-lookup", "0"),
        ("--policy", "h2o", "--budget", "0"),
    ],
    ids=" ".join,
)
def test_what_no_method_takes_is_refused_before_torch(document, options):
    require_refused_at_once([[text.format(document=document) for text in (*ASK, *options)]])


def test_a_check_before_torch_refuses_nothing_that_a_method_takes(document):
    from snapkv.cli.options import RunOptions
    from snapkv.cli.policy import build_policy

    for given in (
        {"window_size": 1500, "set_": ["budget=2048"]},
        {"budget": 16, "window_size": 8},
        {"budget": 20},
        {"budget": 17, "pooling": "max"},
        {"budget": 17, "kernel_size": "5"},
        {"budget": 33, "policy": "snapkv"},
        {"window_size": 2000},
        {"window_size": 2000, "budget": "auto", "policy": "snapkv"},
        {"budget": {"auto": {"most": 100, "least": 1}}},
        {"decay": 0.5},
        {"budget": 16, "policy": "tova"},
        {"keep_ratio": 1.0, "window_size": 2000},
        {"kernel_size": "1", "budget": 10**15},
    ):
        build_policy(RunOptions(**given))
