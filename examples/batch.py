"""A batch of questions about one text: read once, and voted on by each of them."""

from pathlib import Path

from snapkv import Document, default_policy
from snapkv_app.models import load

QUESTIONS = [
    "The key of the garden shed hangs in the",
    "The chimney is swept every",
    "Bins stand at the road before",
]

demo = load("demo")  # or AutoModelForCausalLM and AutoTokenizer of another model
files = sorted((Path(__file__).parent / "house").glob("*.txt"))
text = "\n\n".join(file.read_text("utf-8") for file in files)
document = Document(
    demo.model, demo.tokenizer(text, return_tensors="pt").input_ids, default_policy(192)
)
questions = demo.tokenizer([f"\n\n{each}" for each in QUESTIONS], add_special_tokens=False)
inputs = document.inputs(questions.input_ids)

output = demo.model.generate(**inputs, max_new_tokens=6, do_sample=False)
answers = demo.tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :])
for question, answer in zip(QUESTIONS, answers, strict=True):
    print(f"{question}{answer.splitlines()[0]}")
print(inputs["cache"].report())  # before transformers 5.24: inputs["past_key_values"]
