"""The cache in a `transformers` pipeline: what you have stays as it is, with one argument more."""

from transformers import pipeline

from snapkv import CompressedCache, default_policy
from snapkv_app.models import load

demo = load("demo")  # or AutoModelForCausalLM and AutoTokenizer of another model
generator = pipeline("text-generation", model=demo.model, tokenizer=demo.tokenizer)

log = "".join(
    f"09:{minute:02}  pump {minute % 7} ran for a minute, all well\n" for minute in range(60)
)
log = log.replace("pump 3 ran for a minute, all well", "pump 3 stopped: the filter is blocked", 1)
prompt = f"{log}\n\nWhy did pump 3 stop? Pump 3 stopped because the filter is"

cache = CompressedCache(demo.model, default_policy(256))
(said,) = generator(
    prompt, past_key_values=cache, max_new_tokens=1, do_sample=False, return_full_text=False
)
print("the filter is", said["generated_text"].strip())
print(cache.report())
