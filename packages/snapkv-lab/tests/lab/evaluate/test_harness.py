"""lm-eval's tasks with compressed caches: likelihoods by hand, local tasks, and one command."""

import json

import pytest
import torch
from lm_eval.api.instance import Instance

from snapkv import default_policy
from snapkv.errors import OutOfMemoryError
from snapkv.hf.cache import CompressedCache
from snapkv.policies import H2O, AdaKV, FullCache, SnapKV
from snapkv_app.answering import answer
from snapkv_app.cli.app import run
from snapkv_app.likelihood import log_likelihoods
from snapkv_app.prompts import Prompt
from snapkv_app.settings import GenerationSettings
from snapkv_lab.evaluate.asking import Method
from snapkv_lab.evaluate.harness import CompressedLM
from snapkv_lab.evaluate.store import Store
from tests.lab.evaluate.tiny import records, tiny_loaded

FULL = Method(label="full", policy=FullCache())

CONTEXT = "The gate opens at nine. The key is under the blue stone. " * 12

TASK = """
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}, cache_dir: CACHE}
test_split: test
"""
ASKED = 'doc_to_text: "{{text}}Question: {{question}}\\nAnswer:"'
TASKS = {
    "gate": f"""
task: local_gate
output_type: generate_until
{ASKED}
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n", "."], max_gen_toks: 6, temperature: 1, do_sample: false}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}}
metadata: {{version: 3.0}}
""",
    "choice": f"""
task: local_choice
output_type: multiple_choice
{ASKED}
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 1
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
""",
    "whole": """
task: local_whole
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
""",
}

ROWS = [
    {
        "text": CONTEXT,
        "question": "Where is the key?",
        "answer": "under the blue stone",
        "choices": ["on a tree", "under the blue stone", "at noon"],
    },
    {
        "text": CONTEXT,
        "question": "When does the gate open?",
        "answer": "at nine",
        "choices": ["never", "at nine", "in a boat with two oars"],
    },
]


@pytest.fixture(scope="module")
def tiny(demo):
    return tiny_loaded(demo.tokenizer, positions=8192)


@pytest.fixture
def folder(tmp_path):
    """Task files with a local file of rows."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = TASK.replace("ROWS", str(rows)).replace("CACHE", str(tmp_path / "cache"))
    for name, text in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(text + data)
    return tmp_path


@pytest.fixture
def evaluate(tiny, folder, monkeypatch, capsys):
    """Run the command on the tiny model, and return its status and its output."""

    monkeypatch.chdir(folder)

    def call(tasks, *options, loaded=tiny, include_path=folder):
        monkeypatch.setattr("snapkv_app.cli.loading.load", lambda **_: loaded)
        command = ["eval", "lm-eval", "--tasks", tasks, "--include-path", str(include_path)]
        status = run([*command, "--budget", "64", *options])
        return status, *capsys.readouterr()

    return call


def requests(kind, *arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=one, idx=i, metadata=("a task", i, 1))
        for i, one in enumerate(arguments)
    ]


def plain_log_likelihood(model, context, continuation):
    """Score a continuation without a cache: all tokens in one pass."""
    whole = torch.cat([context, continuation], dim=1)
    with torch.no_grad():
        scores = model(whole).logits.log_softmax(dim=-1)
    predicted = scores[:, context.shape[1] - 1 : -1]
    return float(predicted.gather(2, continuation[:, :, None]).sum())


def stepwise_log_likelihood(model, context, continuation, policy):
    """Score a continuation after a compressed cache, one token at a time."""
    cache = CompressedCache(model, policy)
    total, fed = 0.0, context
    with torch.no_grad():
        for token in continuation[0]:
            cache.expect_tokens(fed)
            scores = model(fed, past_key_values=cache).logits[0, -1].log_softmax(dim=-1)
            total, fed = total + float(scores[token]), token.view(1, 1)
    return total


@pytest.fixture(scope="module")
def ids(tiny):
    context = tiny.tokenizer(CONTEXT, return_tensors="pt").input_ids
    return context, tiny.tokenizer(" under the blue stone", return_tensors="pt").input_ids


EVERY_WAY = [FullCache(), default_policy(40), H2O(40)]
HYBRID = {"family": "lfm2", "layer_types": ["conv", "full_attention"]}
WAYS = [*(({}, policy) for policy in EVERY_WAY), (HYBRID, AdaKV(SnapKV(40)))]


@pytest.mark.parametrize(("changed", "policy"), WAYS, ids=lambda each: getattr(each, "name", ""))
def test_continuations_of_a_shared_context_score_as_alone(tiny, ids, changed, policy):
    """They have different lengths, the longest in the middle, and one is what greedy decoding
    gives.
    """
    loaded = tiny_loaded(tiny.tokenizer, **changed) if changed else tiny
    context, other = ids
    completed = loaded.completed(policy)
    with torch.no_grad():
        cache = CompressedCache(loaded.model, completed)
        own = loaded.model.generate(
            context, past_key_values=cache, max_new_tokens=4, do_sample=False, pad_token_id=0
        )[:, context.shape[1] :]
    given = [own, other[:, :1], torch.cat([other, other], dim=1), own[:, :2], other]
    found = list(log_likelihoods(loaded, context, given, policy, 2))
    for one, (score, greedy) in zip(given, found, strict=True):
        alone = stepwise_log_likelihood(loaded.model, context, one, completed)
        assert score == pytest.approx(alone, abs=1e-4)
        assert greedy == (own[:, : one.shape[1]].equal(one))
    plain = plain_log_likelihood(loaded.model, context, other)
    assert (abs(found[-1][0] - plain) < 1e-3) == isinstance(policy, FullCache)


def test_a_context_is_read_once_for_all_its_continuations(tiny, tmp_path, monkeypatch):
    read = []
    real = tiny.model.forward

    def forward(input_ids, **options):
        read.append(tuple(input_ids.shape))
        return real(input_ids, **options)

    monkeypatch.setattr(tiny.model, "forward", forward)
    choices = [(CONTEXT, " at nine"), (CONTEXT, " under the blue stone"), (CONTEXT, " no")]
    with Store(tmp_path, {}) as store:
        model = CompressedLM(tiny, Method(label="s", policy=SnapKV(40)), store, batch_size=3)
        model.loglikelihood(requests("loglikelihood", *choices, ("Another text", " at nine")))
    (first, together, *rest) = read
    assert first[0] == 1
    assert first[1] > 150
    assert together[0] == 3
    assert together[1] < 10
    assert all(rows == 1 for rows, _ in rest)


TEXTS = [CONTEXT, CONTEXT[40:] * 2, "Short. " + CONTEXT[:90], CONTEXT[7:300], "The gate"]


@pytest.mark.parametrize("policy", EVERY_WAY, ids=lambda policy: policy.name)
def test_prompts_in_a_batch_get_the_same_answers_as_alone(tiny, tmp_path, policy):
    """They have different lengths, some are shorter than the budget, and some stop early."""
    method = Method(label="own", policy=policy)
    alone = [
        answer(tiny, Prompt(text=text), policy, GenerationSettings(max_new_tokens=9)).text
        for text in TEXTS
    ]
    stop = alone[1][4:6]
    given = [(text, {"until": [stop], "max_gen_toks": 9}) for text in TEXTS]
    with Store(tmp_path, {}) as store:
        model = CompressedLM(tiny, method, store, batch_size=3)
        found = model.generate_until(requests("generate_until", *given))
    assert found == [text.partition(stop)[0] for text in alone]
    assert found != alone


def test_contexts_are_cut_at_the_same_places_as_by_lm_eval(tiny, tmp_path):
    """Blanks at the end belong to the continuation, and an empty context is one token."""
    asked = ("The gate ", "opens"), ("The gate", " opens"), ("", "opens")
    with Store(tmp_path, {}) as store:
        model = CompressedLM(tiny, FULL, store)
        blanks, moved, empty = model.loglikelihood(requests("loglikelihood", *asked))
    assert blanks == moved
    first = torch.tensor([[tiny.tokenizer.bos_token_id]])
    opens = tiny.tokenizer("opens", return_tensors="pt").input_ids
    assert empty[0] == pytest.approx(plain_log_likelihood(tiny.model, first, opens), abs=1e-4)


def test_lm_eval_command_runs_local_tasks_with_every_method(evaluate):
    status, out, _ = evaluate("local_gate,local_choice", "--policy", "snapkv", "--json")
    assert status == 0
    found = json.loads(out)
    shown = {(r["task"], r["method"], r["metric"], r["samples"]) for r in found["rows"]}
    assert shown == {
        (task, method, metric, 2)
        for task, metric in (("local_gate", "exact_match"), ("local_choice", "acc"))
        for method in ("full", "snapkv@64")
    }
    assert found["run"]["tasks"] == ["local_gate", "local_choice"]
    assert {r["version"] for r in found["rows"] if r["task"] == "local_gate"} == {3.0}


@pytest.mark.parametrize(
    ("tasks", "options", "message"),
    [
        ("local_whole", {}, "tasks: local_whole scores whole texts"),
        ("", {}, "tasks: expected the names of tasks of lm-eval"),
        ("local_gate", {"include_path": "nowhere"}, "include_path: expected a folder"),
        ("local_gate", {}, "tasks: the data of local_gate cannot be loaded"),
    ],
)
def test_bad_input_of_lm_eval_is_reported_in_one_line(evaluate, folder, tasks, options, message):
    if "the data" in message:
        (folder / "rows.jsonl").unlink()
    status, _, err = evaluate(tasks, **options)
    assert status == 2
    assert message in err.splitlines()[-1]


def test_missing_lm_eval_error_names_the_install_command(evaluate, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    status, _, err = evaluate("local_gate")
    assert status == 2
    assert "Run pip install 'lm-eval" in err


# Runs that are continued.


class Added(list):
    """The stored responses. After `fails_at` of them, memory runs out."""

    fails_at = None


@pytest.fixture
def added(monkeypatch):
    """Record every response from now on, since each is stored as soon as it is known."""
    given, real = Added(), Store.add

    def add(self, record):
        if len(given) == given.fails_at:
            raise OutOfMemoryError("prompt: about 12 tokens would fit")
        given.append(record)
        real(self, record)

    monkeypatch.setattr(Store, "add", add)
    return given


BOTH = "local_gate,local_choice"
ANSWERS = 2 * (2 + 2 * 3)  # of both methods: two questions, and three choices of each of two


def test_stopped_lm_eval_run_only_asks_missing_requests(evaluate, added, folder):
    stop, batches = 10, ("--batch-size", "2")
    _, whole, _ = evaluate(BOTH, "--json", "--results", "whole", *batches)
    assert len(added) == len(records(folder / "whole")) == ANSWERS
    added.clear()
    added.fails_at = stop
    assert evaluate(BOTH, "--results", "stopped", *batches)[0] == 1
    assert len(records(folder / "stopped")) == stop
    added.clear()
    added.fails_at = None
    status, found, _ = evaluate(BOTH, "--json", "--results", "stopped", *batches)
    assert status == 0
    assert len(added) == ANSWERS - stop
    assert records(folder / "stopped") == records(folder / "whole")
    assert json.loads(found)["rows"] == json.loads(whole)["rows"]
    summaries = [(folder / name / "summary.jsonl").read_text() for name in ("stopped", "whole")]
    assert summaries[0] == summaries[1]


@pytest.mark.slow
def test_changed_request_is_asked_again(evaluate, added, folder):
    evaluate("local_gate", "--results", "run")
    added.clear()
    rows = [ROWS[0], {**ROWS[1], "question": "Who opens the gate?"}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, _, _ = evaluate("local_gate", "--results", "run")
    assert status == 0
    assert len(added) == 2
    assert {record["sample"].rpartition("/")[0] for record in added} == {"local_gate/1/0"}
