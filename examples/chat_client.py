"""A conversation with a server of compressed prompts, through the `openai` client.

snapkv serve Qwen/Qwen3-4B --budget 1024                 in one terminal
python examples/chat_client.py http://localhost:8000/v1  in another
"""

import sys
from pathlib import Path

from openai import OpenAI

QUESTIONS = ["What does the letter P on the boiler mean?", "Whom do I call if it comes back?"]
BUDGET = 128  # of every request here; by default it is the server's

client = OpenAI(base_url=sys.argv[1], api_key="none")
model = client.models.list().data[0].id
manual = (Path(__file__).parent / "house" / "boiler.txt").read_text("utf-8")
messages = [{"role": "system", "content": f"Answer from this text:\n\n{manual}"}]

for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    print(f"\n> {question}")
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=60,
        temperature=0,
        extra_body={"vllm_xargs": {"snapkv_budget": BUDGET}},
    )
    said = answer.choices[0].message.content
    print(said)
    print(f"({answer.usage.prompt_tokens} tokens read, at most {BUDGET} kept)")
    messages.append({"role": "assistant", "content": said})
