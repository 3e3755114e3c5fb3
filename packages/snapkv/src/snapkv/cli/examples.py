"""Command lines to begin with: one or two per command, as its help shows them."""

_ASKED = '-q "Who may end it?"'

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": ("snapkv demo", f"snapkv ask contract.pdf {_ASKED}"),
    "demo": ("snapkv demo", "snapkv demo --budget 256"),
    "ask": (
        f"snapkv ask contract.pdf {_ASKED} --compare",
        f"snapkv ask --library snapkv-library {_ASKED}",
    ),
    "generate": ("snapkv generate notes.txt --prompt 'In short:' --budget 512",),
    "chat": ("snapkv chat contract.pdf", "snapkv chat notes.txt --budget 2k --recall none"),
    "inspect": (f"snapkv inspect contract.pdf {_ASKED} --output report.html",),
    "plan": (
        "snapkv plan --model llama-3.1-8b --context 128k --gpu-memory 80GB",
        "snapkv plan --shapes",
    ),
    "policies": ("snapkv policies", "snapkv policies --json"),
    "leaderboard": ("snapkv leaderboard --methods snapkv,tova --ratios 4:1 --length 1k",),
    "serve": ("snapkv serve demo --budget 512 --max-model-len 8192",),
    "library": ("snapkv library add contract.pdf notes.txt", "snapkv library list snapkv-library"),
    "library add": (
        "snapkv library add contract.pdf notes.txt",
        "snapkv library add contract.pdf --to legal --policy adakv --set policy=kvzip",
    ),
    "library list": ("snapkv library list snapkv-library",),
    "library check": ("snapkv library check snapkv-library",),
    "library remove": ("snapkv library remove snapkv-library contract.pdf",),
    "eval": ("snapkv eval needle --lengths 1k,4k --policy snapkv,tova --budget 256,1k",),
    "eval needle": (
        "snapkv eval needle --lengths 1k,4k --policy snapkv,tova --budget 256,1k",
        "snapkv eval needle --setting both --report needle-page",
    ),
    "eval lines": ("snapkv eval lines --lengths 2k --samples-each 4 --plot lines.svg",),
    "eval instructions": ("snapkv eval instructions --lengths 2k --protect-instructions",),
    "eval tracking": ("snapkv eval tracking --kinds cycle --policy r-kv --budget 128",),
    "eval turns": (
        "snapkv eval turns --turns append,recall,recall-pages:8 --cloze --template none",
    ),
    "eval functions": ("snapkv eval functions --turns append,recall --budget 1k --reference-loss",),
    "eval longbench": ("snapkv eval longbench --datasets qasper --limit 5 --budget 1k",),
    "eval ruler": ("snapkv eval ruler --tasks niah_single_2,vt --lengths 4k --limit 5",),
    "eval rag-citation": ("snapkv eval rag-citation --corpus squad --documents 5,10",),
    "eval rag-position": ("snapkv eval rag-position --corpus squad --documents 10",),
    "eval rag-pipeline": ("snapkv eval rag-pipeline --corpus squad --documents 5,10",),
    "eval lm-eval": ("snapkv eval lm-eval --tasks squadv2 --limit 20 --budget 512",),
    "bench": ("snapkv bench decode --lengths 1k,4k --policy snapkv,tova",),
    "bench decode": (
        "snapkv bench decode --lengths 1k,4k --policy snapkv,tova",
        "snapkv bench decode --lengths 8k --budget 512 --output rows.jsonl",
    ),
    "bench prefill": ("snapkv bench prefill --lengths 2k --prefill exact --prefill gemfilter",),
    "bench memory": ("snapkv bench memory --lengths 4k --chunk-tokens 512",),
    "bench throughput": ("snapkv bench throughput --lengths 4k --memory-gb 8",),
    "study": ("snapkv study hit-rate --document contract.pdf",),
    "study hit-rate": ("snapkv study hit-rate --document contract.pdf --plot hits.svg",),
    "study overlap": ("snapkv study overlap --document contract.pdf",),
    "study instructions": (f"snapkv study instructions --document contract.pdf {_ASKED} -q Why?",),
    "study position": ("snapkv study position --document contract.pdf",),
    "study sensitivity": ("snapkv study sensitivity --windows 16,32 --kernels 5,7",),
    "study induction": ("snapkv study induction --kinds digits,words",),
    "study early-layer": ("snapkv study early-layer --layers 10,15,20",),
    "study heads": ("snapkv study heads --samples 4",),
    "medusa": ("snapkv medusa train --document notes.txt --to medusa-heads",),
    "medusa train": (
        "snapkv medusa train --document notes.txt --to medusa-heads",
        "snapkv medusa train --document contract.pdf --num-heads 2 --answers 200",
    ),
}
"""By the words of a command, none for the program itself; a group shows one of its commands."""
