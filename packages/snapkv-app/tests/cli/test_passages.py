"""`ask --passages`: documents longer than the model, of which the best passages are read."""

import io
import json
import re
import shlex

import pytest

from snapkv.prefill.decoder import decoder_layers
from tests.cli.conftest import given
from tests.lab.evaluate.tiny import tiny_loaded

FACT = "The key of the boathouse hangs behind the red door."
QUESTION = ("-q", "Where does the key of the boathouse hang?")
START = ("--answer-start", "The key of the boathouse hangs behind the")


def lines_of_filler(count, word):
    """Lines with as much in common with the question as that word has."""
    return [f"On day {n} the ferry took {n % 7} {word} to the island." for n in range(count)]


@pytest.fixture
def long(here):
    """A text of some three times the tiny model's 1,024 positions, the fact in its line 201."""
    lines = lines_of_filler(240, "crates")
    (here / "log.txt").write_text("\n".join([*lines[:200], FACT, *lines[200:]]))
    return "log.txt"


class Machine:
    """A clock that moves while a model reads, and stands still otherwise.

    `speed` returns how many tokens the model reads in a second at a time of the clock.
    """

    def __init__(self, model, monkeypatch):
        self.now, self.speed, self._layers = 0.0, lambda now: 1e9, decoder_layers(model)
        self._hooks = [layer.register_forward_hook(self._tick) for layer in self._layers]
        for module in ("snapkv_app.reading", "snapkv_app.cli.sources"):
            monkeypatch.setattr(f"{module}.perf_counter", lambda: self.now)

    def _tick(self, module, arguments, output):
        states = output[0] if isinstance(output, tuple) else output
        self.now += states.shape[1] / self.speed(self.now) / len(self._layers)

    def close(self):
        for hook in self._hooks:
            hook.remove()


@pytest.fixture
def deep(demo, monkeypatch):
    """A model of 2,048 positions, with so many layers that the clock is looked at often."""
    loaded = tiny_loaded(demo.tokenizer, positions=2048, layers=8)
    given(monkeypatch, loaded)
    return loaded


@pytest.fixture
def machine(deep, monkeypatch):
    found = Machine(deep.model, monkeypatch)
    yield found
    found.close()


def test_too_long_text_is_refused_with_a_command_that_answers(snapkv, refused, tiny_only, long):
    asked = ("ask", long, *QUESTION, "--max-new-tokens", 2)
    said = refused(*asked)
    assert "prompt: the prompt of 4,266 tokens and an answer of up to 2 do not fit into" in said
    told, _, command = said.strip().rpartition(", run: ")
    assert re.search(r"match the question best, 1,022 tokens in about \d+ seconds$", told)
    assert command == shlex.join(["snapkv", *map(str, asked), "--passages", "1022"])
    done = snapkv(*shlex.split(command)[1:])
    assert done.status == 0
    assert "read 1 of 18 passages: lines 191-210\n" in done.err


@pytest.mark.parametrize(
    ("speed", "told", "limit"),
    [
        (20.01, "600 tokens in about 30 seconds", "600"),
        (4, "512 tokens in about 128 seconds", "512,256s"),
    ],
)
def test_fewer_tokens_are_suggested_for_a_slow_model(
    snapkv, refused, long, machine, speed, told, limit
):
    machine.speed = lambda now: speed
    said = refused("ask", long, *QUESTION, "--max-new-tokens", 2)
    assert f"{told}, run: snapkv ask" in said
    assert said.endswith(f"--passages {limit}\n")
    done = snapkv(*shlex.split(said.rpartition(", run: ")[2])[1:])
    assert done.status == 0
    assert "s were enough for" not in done.err


SLOW = {  # tokens in a second, by the time
    "slow from the beginning": ("snapkv", lambda now: 20),
    "slower than measured": ("snapkv", lambda now: 80 if now < 1.7 else 18),
    "two readings": ("kvzip", lambda now: 60),
}


@pytest.mark.parametrize("case", SLOW)
def test_passages_are_read_within_the_time(snapkv, here, machine, case):
    lines = lines_of_filler(240, "keys")
    (here / "log.txt").write_text("\n".join([*lines[:200], FACT, *lines[200:]]))
    policy, machine.speed = SLOW[case]
    asked = ("ask", "log.txt", *QUESTION, "--policy", policy, "--max-new-tokens", 1)
    done = snapkv(*asked, "--passages", "2k", "--json")
    assert done.status == 0, done.err
    found, (run,) = json.loads(done.out)["passages"], json.loads(done.out)["runs"]
    assert machine.now < 7 + 60  # measuring the speed comes before
    assert 1 <= found["read"] < found["fitting"] == 7
    assert any(first <= 201 <= last for first, last in (each["lines"] for each in found["places"]))
    machine.now = 0.0
    said = snapkv(*asked, "--passages", "2k").err
    assert f"60 s were enough for {run['prompt_tokens']:,} of 1," in said
    machine.now, (command,) = 0.0, re.findall(r"to read all of them: snapkv (.*)", said)
    done = snapkv(*shlex.split(command), "--json")
    assert json.loads(done.out)["passages"]["read"] == found["fitting"]


def test_text_that_fits_is_not_read_in_full_without_the_time(snapkv, here, machine):
    (here / "log.txt").write_text("\n".join(lines_of_filler(45, "keys")))
    asked = ("ask", "log.txt", "-q", "Which keys?", "--max-new-tokens", 1, "--json")
    assert json.loads(snapkv(*asked, "--passages", "1k").out)["passages"] is None
    machine.speed = lambda now: 10
    found = json.loads(snapkv(*asked, "--passages", "1k").out)["passages"]
    assert found["read"] < found["fitting"] == found["of"]


def test_passage_that_is_too_long_for_the_time_is_refused(snapkv, refused, long, machine):
    machine.speed = lambda now: 2
    asked = ("ask", long, *QUESTION, "--max-new-tokens", 1, "--passages")
    tokens, needed, limit = re.search(
        r"passages: reading one passage of (\d+) tokens takes about (\d+) seconds on this machine, "
        r"but only 60 of the 60 seconds are left\. Use --passages (\S+) to allow more time, or",
        refused(*asked, "2k"),
    ).groups()
    assert int(needed) == pytest.approx(int(tokens) / 2, abs=1)
    assert machine.now < 64 + 60
    assert snapkv(*asked, limit).status == 0


def test_answer_is_not_stopped_with_the_reading(snapkv, long, machine):
    machine.speed = lambda now: 30 if now < 14 else 1
    asked = ("ask", long, *QUESTION, "--max-new-tokens", 60, "--prompt-lookup", 4, "--json")
    done = snapkv(*asked, "--passages", "512,25s")
    assert done.status == 0, done.err
    assert machine.now > 25


@pytest.mark.parametrize(
    "limit", ["4k,", "4k,90", "4k,0s", "4k,-3s", "4k,1.5s", "4k,9s,9s", "4k,9999999s"]
)
def test_time_that_is_no_number_of_seconds_is_refused(refused, nothing_is_loaded, long, limit):
    message = refused("ask", long, *QUESTION, "--passages", limit)
    assert "passages: expected tokens, or tokens and seconds such as 4k,90s, but got" in message


def test_limit_below_one_passage_is_refused_with_the_limit_that_works(
    snapkv, refused, tiny_only, long
):
    asked = ("ask", long, *QUESTION, "--max-new-tokens", 1, "--passages")
    said = refused(*asked, "10")
    assert re.search(
        r"passages: expected at least the \d+ tokens of .* the question, but got 10",
        said,
    )
    done = snapkv(*asked, re.search(r"Use --passages (\d+)\.", said)[1])
    assert done.status == 0, done.err


def test_passages_that_fit_are_read_in_the_order_of_the_text(snapkv, tiny_only, here):
    lines = lines_of_filler(240, "keys")
    lines[200] = FACT
    (here / "log.txt").write_text("\n".join(lines))
    (here / "second.txt").write_text("A key.")
    asked = ("ask", "log.txt", "second.txt", "-q", "Which keys? boathouse", "--passages", "4k")
    done = snapkv(*asked, "--max-new-tokens", 8, "--json")
    record = json.loads(done.out)
    (run,), found = record["runs"], record["passages"]
    assert 700 < run["prompt_tokens"] <= 1024 - 8
    assert 2 < found["read"] < found["of"] == 19
    places = [(place["document"], *place["lines"]) for place in found["places"]]
    assert places == sorted(places)
    assert any(first <= 201 <= last for name, first, last in places if name == "log.txt")
    assert snapkv(*asked).err.count("log.txt, lines ") == 1
    few = json.loads(snapkv(*asked[:-1], "400", "--max-new-tokens", 1, "--json").out)
    assert few["runs"][0]["prompt_tokens"] <= 400
    assert few["passages"]["read"] < found["read"]


def test_text_that_fits_is_read_in_full(snapkv, tiny_only, document):
    asked = ("ask", document, "-q", "Who?", "--max-new-tokens", 1, "--json")
    whole, same = (json.loads(snapkv(*asked, *more).out) for more in ((), ("--passages", "1k")))
    assert whole["passages"] is same["passages"] is None
    assert whole["runs"][0]["prompt_tokens"] == same["runs"][0]["prompt_tokens"]


TOO_MUCH = {  # question and answer, without a passage
    "answer": ((*QUESTION, "--max-new-tokens", 1024), "lower max_new_tokens to at most"),
    "question": (("-q", "Which key? " * 400), "shorten the prompt"),
}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("-q", "zebra?"), "question: no word of 'zebra?' occurs in the documents. Use"),
        *TOO_MUCH.values(),
    ],
)
def test_question_that_no_passage_fits_is_refused(refused, tiny_only, long, more, said):
    message = refused("ask", long, "--passages", "4k", *more)
    assert said in message
    assert "read the passages" not in message


@pytest.mark.parametrize("what", TOO_MUCH)
@pytest.mark.parametrize("command", ["ask", "inspect", "chat"])
def test_passages_are_not_suggested_if_the_question_alone_is_too_long(
    snapkv, tiny_only, long, monkeypatch, command, what
):
    _, question, *more = TOO_MUCH[what][0]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{question}\n"))
    done = snapkv(command, long, *(() if command == "chat" else ("-q", question)), *more)
    assert done.status
    assert "prompt: the prompt of" in done.err
    assert "--passages" not in done.err


@pytest.mark.parametrize("command", ["inspect", "chat"])
def test_chat_and_inspect_suggest_ask_with_passages(snapkv, tiny_only, long, monkeypatch, command):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTION[1]}\n"))
    done = snapkv(command, long, *(() if command == "chat" else QUESTION))
    assert done.status
    answers = shlex.split(done.err.strip().rpartition(", run: ")[2])
    assert answers[:-1] == ["snapkv", "ask", long, *QUESTION, "--passages"]
    assert snapkv(*answers[1:], "--max-new-tokens", 1).status == 0


@pytest.mark.parametrize("command", ["ask --passages 1k", "chat"])
def test_tokenized_characters_are_limited_by_the_model(
    snapkv, tiny_only, tiny, here, monkeypatch, command
):
    from snapkv_app.prompts import Prompt

    (here / "log.txt").write_text("\n".join(lines_of_filler(6000, "keys")))
    counted, encoded = [], Prompt.encoded

    def counting(self, tokenizer, *, end=None, **more):
        counted.append(len(self.text[:end]))
        return encoded(self, tokenizer, end=end, **more)

    monkeypatch.setattr(Prompt, "encoded", counting)
    name, *more = command.split()
    question = () if name == "chat" else ("-q", "Which keys?")
    monkeypatch.setattr("sys.stdin", io.StringIO("Which keys?\n"))
    done = snapkv(name, "log.txt", *question, *more, "--max-new-tokens", 1)
    assert bool(more) == (done.status == 0)
    assert bool(more) != ("prompt: the prompt of more than" in done.err)
    assert max(counted) < 2 * 32 * tiny.max_tokens
    assert len(counted) < 20


@pytest.mark.parametrize(
    ("word", "tokens"), [("crates", "1k"), pytest.param("keys", "8k", marks=pytest.mark.slow)]
)
def test_demo_model_finds_a_fact_in_three_times_its_positions(
    snapkv, demo_only, demo, here, word, tokens
):
    lines = lines_of_filler(1600, word)
    lines[1300] = FACT
    (here / "log.txt").write_text("\n".join(lines))
    assert len(demo.tokenizer("\n".join(lines)).input_ids) > 3 * demo.max_tokens
    done = snapkv("ask", "log.txt", *QUESTION, *START, "--max-new-tokens", 4, "--passages", tokens)
    assert done.status == 0, done.err
    assert "behind the red door" in done.out
