"""Questions about a folder of texts, each of which the model reads once and for ever.

python examples/folder.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

from snapkv_app import Library
from snapkv_app.models import load

QUESTIONS = [
    "What is the telephone number of the plumber?",
    "Where does the key of the garden shed hang?",
    "On which day is paper collected?",
]

folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "house")
demo = load("demo")  # or "Qwen/Qwen3-4B"

with tempfile.TemporaryDirectory() as place:  # yours stays: Library("house.library")
    library = Library(place)
    texts = [(path.name, path.read_text("utf-8")) for path in sorted(folder.glob("*.txt"))]
    for outcome in library.add(demo.model, demo.tokenizer, texts):
        print(f"{outcome.name}: {outcome.what}, {outcome.tokens} tokens")

    for question in QUESTIONS:
        hits = library.search(question, documents=1)
        inputs = library.inputs(demo.model, demo.tokenizer, question, hits)
        output = demo.model.generate(**inputs, max_new_tokens=40, do_sample=False)
        answer = output[0, inputs["input_ids"].shape[1] :]
        print(f"\n{question}\n{demo.tokenizer.decode(answer, skip_special_tokens=True).strip()}")
        print("in", ", ".join(hit.name for hit in hits))
