"""Invalid command lines get one line on standard error with the reason, and status 2."""

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
        ("--policy snapkv:pooling=max", ". Run snapkv policies to see all methods"),
        ("--budget many", "--budget"),
        ("--model loop", "contains a loop of symbolic links"),
        ("--assistant demo --prompt-lookup 3", "drafts: use only one of"),
        ("--prompt-lookup 0", "prompt_lookup: expected"),
        ("--budget 48 --prompt-lookup 3 --policy tova", "only compresses the prompt"),
        (
            "--prompt-lookup 3 --prefill layer-by-layer",
            "drafts cannot be used with --prefill layer-by",
        ),
        ("--prompt-lookup 3 --policy kvzip", "drafts: drafts cannot be used with kvzip"),
    ],
    "ask": [
        ("notes.txt -q 'a \udcff'", "question: expected Unicode text, but got '\\udcff'"),
        ("note.txt -q Why?", "Did you mean notes.txt?"),
        ("loop/a -q Why?", "a, which contains a loop of symbolic links"),
        ("lost -q Why?", "lost, which is a symbolic link to gone, which does not exist"),
        ("empty.txt -q Why?", "contains no text. Use a file"),
        ("cut.pdf -q Why?", "file: expected a "),
        ("papers --library lib -q Why?", "files: expected either files or --library, but got both"),
        ("-q Why?", "files: expected either files or --library, but got neither"),
        ("-q Why? papers --documents 2", "documents: this option can only be used with --library"),
        (
            "-q Why? papers --recompute 0.5",
            "recompute: this option can only be used with --library",
        ),
    ],
    "ask -q Why? --library": [
        ("lib --recompute 1.5", "recompute: expected a number in [0, 1]"),
        ("lib --assistant demo", "assistant: this option cannot be used with --library"),
        ("lib --prompt-lookup 3", "prompt_lookup: this option cannot be used"),
        ("lib --protect x", "protect: this option cannot be used with --library"),
        ("none", "library: there is no library in the folder 'none'"),
        ("''", "library: expected the name of a folder, but got an empty name"),
        ("papers", "library: the folder 'papers' is not a library, because it contains"),
    ],
    "library add papers": [
        ("--bits int3", "bits: expected one of"),
        ("--keep-ratio 0.5", "policy: the parameters belong to a method"),
        ("--seed 3", "policy: the parameters belong to a method"),
        ("--to papers", "library: the folder 'papers' is not a library, because it contains"),
        ("--to ' '", "to: expected the name of a file"),
        ("--policy knapsack", "policy: expected one of"),
    ],
    "generate": [
        ("-p \udcff", "prompt: expected Unicode text"),
        ("-p x --answer-start \udcff", "answer_start: expected Unicode"),
        ("-p x --temperature inf", "temperature: the value must be 0 or a finite"),
        ("-p x --model dmo", "Did you mean demo?"),
        ("-p x --model .", "a folder with a config.json"),
        ("-p x --model ./papers/none", "got './papers/none'. Run ls papers"),
        (
            "-p x --model no/such/folder",
            "got 'no/such/folder'. There is no folder with the name no/such",
        ),
        (
            "-p x --model demo --revision main",
            "revision: only models from the hub have revisions, but got 'main'",
        ),
        ("-p x --device gpu", "device: expected auto"),
        ("-p x --dtype int8", "dtype: expected one of"),
        (
            "-p x --check 4 --temperature 0.5",
            "check: this option can only be used with temperature 0",
        ),
        ("-p x --check 4 --max-new-tokens 3", "expected at most max_new_tokens=3, but got 4"),
        ("notes.txt --policy kvzip", "policy: kvzip cannot be used for a prompt that is read only"),
    ],
    "chat notes.txt": [
        ("--compare", "compare: this option is only available"),
        ("--check 4", "check: this option is only available"),
        ("--answer-start x", "answer_start: this option is only available"),
        ("--assistant demo", "assistant: this option is only available"),
        ("--prompt-lookup 3", "prompt_lookup: this option is only available"),
        (
            "--policy h2o --recall host",
            "can only be used with a policy that only compresses prompts",
        ),
        (
            "--recall ''",
            "recall: expected host, none or the name of a folder, but got an empty text",
        ),
        ("--recall no/such/folder", "got 'no/such/folder'. Create the folder 'no/such' first"),
        (
            "--recall none --budget auto",
            "--recall none needs a budget in tokens, but got auto. For example, use --budget",
        ),
        ("--recall none --budget 30%", "budget: --recall none needs a budget in tokens"),
        ("--recall none --keep-ratio 0.5", "got keep_ratio. For example, use --budget 1024"),
        ("-", "files: a document cannot be -"),
    ],
    "inspect notes.txt -q Why?": [
        ("--budgets many", "budgets: expected a whole number such as 4096"),
        ("--budgets ,", "budgets: expected whole numbers separated by commas, but got ','"),
        ("--budgets 64,,128", "budgets: expected whole numbers separated by commas, but got"),
        (f"--budgets {MANY}", "budgets: expected at most 12 budgets, but got 13"),
        ("--budgets 2", "budget: expected"),
        ("--policy fastgen --budgets 64", "budget: this is not a parameter of fastgen"),
        ("--beside @many", "beside: the budget of '@many' is not valid (budget: "),
        ("--beside full@64", "beside: the method already has a budget"),
        ("--beside snapkv:budget=64@128", "beside: the method already has a budget"),
        ("--set budget=100 --beside @64", "set: 'budget=100' sets a budget, but this command"),
        ("--beside nothing@64", "beside: expected one of"),
        ("-o no/such/page.html", "output: the file"),
        ("-o notes.txt/page.html", "output: the file"),
        ("-o ''", "output: expected the name of a file, but got an empty name"),
        ("-o .", "output: expected the name of a file, but got the folder"),
        (f"-o {LONG}", "output: expected a valid file name"),
        ("-o /proc/page.html", "output: files cannot be written to the folder '/proc'"),
    ],
    "plan": [
        ("", "context"),
        ("--context 1k,2k", "context: expected exactly one number"),
        ("--context 128kb", "For example, use --context 4k"),
        ("--context 8k --budget auto", "budget: expected a number of tokens or bytes"),
        ("--context 1k --model qwen3-9b", "Did you mean qwen3-8b"),
        ("--context 1k --gpu-memory 80", "gpu_memory: expected a size with a unit"),
        ("--context 1k --gpu-memory L40X", "or a card such as H100 or RTX 4090, but got 'L40X'"),
        ("--context 1k --gpu-memory a100", "gpu_memory: expected A100-40GB or A100-80GB"),
        ("--context 1k --bandwidth 0GB", "bandwidth: expected more than 0 bytes per second"),
        ("--context 1k --model ./none", "model: expected an existing file"),
        ("--context 1k --model lwm-7b --dtype int8", "dtype: expected one of"),
        ("--context 8k --window-size 4k", "budget: expected a value above window_size=4096"),
        ("--context 1k --budget 9 --keep-ratio 0.5", "only one can be set"),
    ],
    "serve": [("--max-model-len", "model: the model must be the first argument")],
    "serve demo": [
        ("--session-bytes 2GiB", "session-bytes: this option can only be used with --sessions"),
        ("--sessions --session-bytes 2", "session_bytes: expected a size with a unit"),
        ("--sessions --session-bytes 0GiB", "session_bytes: expected a value of at least 1"),
        (
            "--print-command --sessions --decode-budget 2048",
            "decode_budget: 2048 is not supported on a server with sessions",
        ),
        (
            "--print-command --decode-policy tova",
            "decode_policy: this limit has no effect if decode_budget is not set",
        ),
        ("--print-command --policy snapk", "across-layers, but got 'snapk'. Did you mean snapkv"),
    ],
    "bench decode": [("--output one.svg --plot one.svg", "this file is already used for output")],
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
