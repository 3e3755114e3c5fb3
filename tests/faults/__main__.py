"""Seed one fault after the other into the running code and report which suites notice it.

Run from the root of the repository; exit status 1 where no suite notices one:

    python -m tests.faults                     every fault, by the suites that are named beside it
    python -m tests.faults --only WORD ...     those whose names or files contain one of these words
    python -m tests.faults --by SUITE ...      by these suites, whether or not they are named
    python -m tests.faults --table             what is on record: runs nothing

A suite is collected once, and for each fault run by a process that has its functions anew. Suites
below `vllm` are run where vLLM is installed.
"""

import argparse
import contextlib
import gc
import importlib
import importlib.util
import io
import os
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from inspect import CO_OPTIMIZED
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FunctionType

import pytest

from tests.faults.faults import FAULTS, Fault


def seed(fault: Fault) -> None:
    """Change the running code of every function of the fault's module that the fault changes. The
    file itself is not changed.

    Raises:
        AssertionError: the old text does not occur exactly once in the file, or no function that
            was imported contains it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a module may be imported here for the first time
        module = importlib.import_module(".".join(Path(fault.file).with_suffix("").parts))
    path = str(module.__file__)
    text = Path(path).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, f"{fault.file}: {fault.old!r} x {text.count(fault.old)}"
    before, after = (
        _by_place(compile(one, path, "exec")) for one in (text, text.replace(fault.old, fault.new))
    )
    changed = {old: new for old, new in zip(before, after, strict=True) if old != new}
    live = [one for one in gc.get_objects() if type(one) is FunctionType]
    found = [(one, changed[one.__code__]) for one in live if one.__code__ in changed]
    assert found, f"{fault.name}: expected a fault in a function that was imported"
    for function, code in found:
        function.__code__ = code


def _by_place(code: CodeType) -> list[CodeType]:
    """Return the code of the functions of a module and of its classes, in the order of the text.
    Functions inside functions are left out.
    """
    parts = (part for part in code.co_consts if isinstance(part, CodeType))
    of_parts = ([one] if one.co_flags & CO_OPTIMIZED else _by_place(one) for one in parts)
    return [one for of_part in of_parts for one in of_part]


class Judge:
    """A plugin of pytest that runs the collected tests once for each fault, and records the faults
    that a test notices in `noticed`.

    If the tests fail without a fault as well, this is printed, and nothing counts as noticed.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults, self.noticed = faults, list[Fault]()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests in a process of its own for each fault, and return True so that pytest runs
        none in this process.
        """
        for fault in self.faults:
            if _fails(session, fault):
                self.noticed.append(fault)
        if self.noticed and _fails(session):
            print(f"{session.config.args[-1]} fails without a fault", file=sys.__stdout__)
            self.noticed.clear()
        return True


def _fails(session: pytest.Session, fault: Fault | None = None) -> bool:
    """Whether a test fails in a copy of this process in which the fault is seeded; without a fault
    if it is None.

    Raises:
        AssertionError: the copy has ended without a result.
    """
    if not (child := os.fork()):
        try:
            _run(session, fault)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 1), "no test was judged"
    return status != 0


def _run(session: pytest.Session, fault: Fault | None) -> None:
    """Run all tests with the fault, silently, and end this process: with status 1 at the first test
    that fails, otherwise with 0.
    """
    if fault is not None:
        seed(fault)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    for item, behind in zip_longest(session.items, session.items[1:]):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=behind)
        if session.testsfailed:
            os._exit(1)
    os._exit(0)


def judged(suite: Path, faults: Sequence[Fault]) -> list[Fault]:
    """Run a suite with each of the faults, and return the faults that it notices.

    Raises:
        AssertionError: the tests of the suite cannot be collected.
    """
    judge = Judge(faults)
    marked = ("-m", "vllm and not slow") if "vllm" in suite.parts else ()
    options = ("-qW", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider")
    with contextlib.redirect_stdout(said := io.StringIO()):
        status = pytest.main([*options, *marked, str(suite)], plugins=[judge])
    assert status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), said.getvalue()
    return judge.noticed


def table(noticed: Iterable[tuple[Fault, Sequence[str]]]) -> str:
    """Return a table as text: how many faults each suite notices, and how many of them no other
    suite notices.

    Args:
        noticed: the faults, each with the suites that notice it.
    """
    of_all, alone = Counter[str](), Counter[str]()
    for _, suites in noticed:
        of_all.update(suites)
        alone.update(suites if len(suites) == 1 else ())
    lines = [f"{'suite':<44} {'noticed':>7} {'alone':>5}"]
    lines += [f"{suite:<44} {of_all[suite]:>7} {alone[suite]:>5}" for suite in sorted(of_all)]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Seed the faults that the arguments choose, print which suites notice them and a table, and
    return the exit status: 1 if a fault is noticed by no suite, otherwise 0.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD")
    parser.add_argument("--by", nargs="+", default=[], metavar="SUITE")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args(arguments)
    if options.table:
        print(table((fault, fault.suites) for fault in FAULTS))
        return 0
    has_vllm = importlib.util.find_spec("vllm") is not None
    asked = defaultdict[tuple[Path, str], list[Fault]](list)
    for fault in FAULTS:
        if any(word in f"{fault.file} {fault.name}" for word in options.only):
            for suite in options.by or fault.suites:
                if has_vllm or "vllm/" not in suite:
                    asked[fault.path_of(suite), suite].append(fault)
    found = {fault: list[str]() for faults in asked.values() for fault in faults}
    for (path, suite), faults in asked.items():
        begun = time.monotonic()
        noticed = judged(path, faults)
        for fault in faults:
            found[fault] += [suite] if fault in noticed else []
            verdict = "notices" if fault in noticed else "DOES NOT NOTICE"
            print(f"{suite} {verdict}: {fault.name}", flush=True)
        print(f"{suite}: {time.monotonic() - begun:.0f} s", flush=True)
    print(table(found.items()))
    return int(not all(found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
