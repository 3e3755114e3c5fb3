"""What a command line cannot be: one line on standard error that says why, and status 2."""

import shlex

import pytest

from tests.app.test_text_files import write_pdf
from tests.library.conftest import TEXTS

pytestmark = pytest.mark.filterwarnings("ignore")  # of what cannot be decoded, and of static caches
MANY = ",".join(map(str, range(64, 77)))
LONG = "x" * 300

REFUSED = {
    "frobnicate": [("", "No such command 'frobnicate'. See snapkv --help")],
    "ask notes.txt": [("", "Missing option"), ("-q '  '", "question: expected a question")],
    "ask notes.txt -q Why?": [
        ("--bugdet 64", "No such option"),
        ("--bugdet 64", ". See snapkv ask --help"),
        ("--policy snapkv:pooling=max", ". Run snapkv policies to see the methods, and set"),
        ("--budget many", "--budget"),
        ("--model loop", "links lead in a loop"),
        ("--assistant demo --prompt-lookup 3", "drafts: expected one of"),
        ("--prompt-lookup 0", "prompt_lookup: expected"),
        ("--budget 48 --prompt-lookup 3 --policy tova", "only compresses the prompt"),
        ("--prompt-lookup 3 --prefill layer-by-layer", "expected none with --prefill layer-by"),
        ("--prompt-lookup 3 --policy kvzip", "drafts: expected none with kvzip"),
    ],
    "ask": [
        ("notes.txt -q 'a \udcff'", "question: expected Unicode text, but got '\\udcff'"),
        ("note.txt -q Why?", "Did you mean notes.txt?"),
        ("loop/a -q Why?", "a, whose symbolic links lead in a loop"),
        ("lost -q Why?", "lost, a symbolic link to gone, which is not there"),
        ("empty.txt -q Why?", "got nothing"),
        ("cut.pdf -q Why?", "file: expected a "),
        ("papers --library lib -q Why?", "files: expected either files or --library, but got both"),
        ("-q Why?", "files: expected either files or --library, but got neither"),
        ("-q Why? papers --documents 2", "documents: this option needs --library"),
        ("-q Why? papers --recompute 0.5", "recompute: this option needs --library"),
    ],
    "ask -q Why? --library": [
        ("lib --recompute 1.5", "recompute: expected a number in [0, 1]"),
        ("lib --assistant demo", "assistant: expected none with --library"),
        ("lib --prompt-lookup 3", "prompt_lookup: expected none"),
        ("lib --protect x", "protect: expected none with --library"),
        ("none", "library: there is no library at 'none'"),
        ("''", "library: expected a folder, but got an empty name"),
        ("papers", "library: the folder 'papers' is not a library, and it contains"),
    ],
    "library add papers": [
        ("--bits int3", "bits: expected one of"),
        ("--keep-ratio 0.5", "policy: expected a method for its parameters"),
        ("--seed 3", "policy: expected a method for its parameters"),
        ("--to papers", "library: the folder 'papers' is not a library, and it contains"),
        ("--to ' '", "to: expected a name"),
        ("--policy knapsack", "policy: expected one of"),
    ],
    "generate": [
        ("-p \udcff", "prompt: expected Unicode text"),
        ("-p x --answer-start \udcff", "answer_start: expected Unicode"),
        ("-p x --temperature inf", "temperature: expected 0, or a finite"),
        ("-p x --model dmo", "Did you mean demo?"),
        ("-p x --model .", "a folder with a config.json"),
        ("-p x --model ./papers/none", "got './papers/none'. See ls papers"),
        ("-p x --model no/such/folder", "got 'no/such/folder'. There is no folder no/such"),
        (
            "-p x --model demo --revision main",
            "revision: only models of the hub have revisions, but got 'main'",
        ),
        ("-p x --device gpu", "device: expected auto"),
        ("-p x --dtype int8", "dtype: expected one of"),
        ("-p x --check 4 --temperature 0.5", "check: expected temperature 0"),
        ("-p x --check 4 --max-new-tokens 3", "expected at most max_new_tokens=3, but got 4"),
        ("notes.txt --policy kvzip", "policy: kvzip cannot be used for a prompt that is read only"),
    ],
    "chat notes.txt": [
        ("--compare", "compare: this option is for snapkv ask, not for chat"),
        ("--check 4", "check: this option is for snapkv ask, not for chat"),
        ("--answer-start x", "answer_start: this option is for snapkv ask, not for chat"),
        ("--assistant demo", "assistant: this option is for snapkv ask, not for chat"),
        ("--prompt-lookup 3", "prompt_lookup: this option is for snapkv ask, not for chat"),
        ("--policy h2o --recall host", "policy: .* can only be used with a policy that only compresses prompts"),
        ("--recall ''", "recall: expected host, a folder or none, but got an empty text. Leave the"),
        ("--recall no/such/folder", "got 'no/such/folder'. Create 'no/such' first"),
        ("--recall none --budget auto", "with --recall none, but got auto. Pass --budget"),
        ("--recall none --budget 30%", "budget: expected a number of tokens with --rec"),
        ("--recall none --keep-ratio 0.5", "got keep_ratio. Pass --budget 1024, or leave"),
        ("-", "files: a document cannot be -"),
    ],
    "inspect notes.txt -q Why?": [
        ("--budgets many", "budgets: expected a whole number such as 4096"),
        ("--budgets ,", "budgets: expected whole numbers with commas between them, but got ','"),
        ("--budgets 64,,128", "budgets: expected whole numbers with commas between them, got"),
        (f"--budgets {MANY}", "budgets: expected at most 12 budgets, but got 13"),
        ("--budgets 8", "budget: expected"),
        ("--policy fastgen --budgets 64", "budget: expected a parameter of fastgen"),
        ("--beside @many", "beside: the budget of '@many' is not valid (budget: "),
        ("--beside full@64", "beside: expected a budget only for a method without one"),
        ("--beside snapkv:budget=64@128", "beside: expected a budget only for a method without"),
        ("--set budget=100 --beside @64", "set: 'budget=100' sets a budget, and other budgets"),
        ("--beside nothing@64", "beside: expected one of"),
        ("-o no/such/page.html", "output: expected a file in an existing folder"),
        ("-o notes.txt/page.html", "output: expected a file in an existing folder"),
        ("-o ''", "output: expected a name, but got an empty one"),
        ("-o .", "output: expected the name of a file, but got the folder"),
        (f"-o {LONG}", "output: expected a valid file name"),
        ("-o /proc/page.html", "output: expected a folder that can be written, but got '/proc'"),
    ],
    "plan": [
        ("", "context"),
        ("--context 1k,2k", "context: expected one number"),
        ("--context 128kb", "For example, use --context 4k"),
        ("--context 8k --budget auto", "budget: expected tokens or bytes"),
        ("--context 1k --model qwen3-9b", "Did you mean qwen3-8b"),
        ("--context 1k --gpu-memory 80", "gpu_memory: expected bytes with a unit"),
        ("--context 1k --gpu-memory L40X", "or a card such as H100 or RTX 4090, but got 'L40X'"),
        ("--context 1k --gpu-memory a100", "gpu_memory: expected A100-40GB or A100-80GB"),
        ("--context 1k --bandwidth 0GB", "bandwidth: expected more than 0 bytes a second"),
        ("--context 1k --model ./none", "model: expected an existing file"),
        ("--context 1k --model lwm-7b --dtype int8", "dtype: expected one of"),
        ("--context 8k --window-size 4k", "budget: expected more than window_size=4096"),
        ("--context 1k --budget 9 --keep-ratio 0.5", "expected only one of them"),
    ],
    "serve": [("--max-model-len", "model: expected the model before all options")],
    "serve demo": [
        ("--session-bytes 2GiB", "session-bytes: this option needs --sessions"),
        ("--sessions --session-bytes 2", "session_bytes: expected bytes with a unit"),
        ("--sessions --session-bytes 0GiB", "session_bytes: expected at least 1"),
        (
            "--print-command --sessions --decode-budget 2048",
            "decode_budget: 2048 is not supported on a server with sessions",
        ),
        (
            "--print-command --decode-policy tova",
            "decode_policy: this limit has no effect without a decode_budget",
        ),
        ("--print-command --policy snapk", "across-layers, but got 'snapk'. Did you mean snapkv"),
    ],
    "bench decode": [
        ("--output one.svg --plot one.svg", "expected another file than that of output")
    ],
    "eval needle": [("--plot .", "plot: expected the name of a file, but got the folder '.'")],
}
CASES = [(f"{words} {more}", said) for words, cases in REFUSED.items() for more, said in cases]


@pytest.fixture
def here(here, document):
    """A folder with files of many kinds, few of which can be read."""
    (here / "empty.txt").touch()
    (here / "loop").symlink_to("loop")
    (here / "lost").symlink_to("gone")
    cut = write_pdf(here / "cut.pdf", ["First page."])
    cut.write_bytes(cut.read_bytes()[:200])
    (here / "papers").mkdir()
    for name, text in TEXTS.items():
        (here / "papers" / f"{name}.txt").write_text(text)
    return here


@pytest.mark.parametrize(("line", "message"), CASES, ids=[ascii(line) for line, _ in CASES])
def test_bad_input_is_refused_in_one_line(refused, here, request, capsys, line, message):
    if "--model" not in line:
        request.getfixturevalue("tiny_only")
        capsys.readouterr()  # what loading it has said
    before = sorted(here.rglob("*"))
    said = refused(*shlex.split(line))
    assert message in said
    assert "Did you mean loop?" not in said
    assert sorted(here.rglob("*")) == before
