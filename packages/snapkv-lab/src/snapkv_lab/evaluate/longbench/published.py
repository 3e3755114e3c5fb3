"""What the paper's Table 1 says, and how its models were asked (Li et al., 2024, Sec. 5.3)."""

from pathlib import PurePath

from snapkv_lab.evaluate.longbench.sets import SETS

_METHODS = ("full", "snapkv@1024", "snapkv@2048", "snapkv@4096", "h2o@4096")

# A line per method, in the order of _METHODS; a column per set, in the order of SETS; percents.
_TABLE = {
    "lwm-text-chat-1m": """
    18.18 25.56 40.94 24.57 19.39 10.49 27.97 24.9 24.81 71.0 60.9 39.73 3.17 3.5 44.4 43.82
    18.02 23.73 40.25 24.61 19.84 10.77 19.79 24.44 23.53 70.0 61.42 39.64 1.67 3.0 43.34 44.0
    17.92 25.03 41.38 24.49 19.38 11.34 21.6 24.22 24.36 70.0 61.11 39.91 2.17 4.0 44.46 44.92
    17.92 25.47 40.76 24.92 19.53 11.27 25.34 25.42 24.58 70.5 61.08 39.62 3.17 4.0 44.49 44.08
    13.17 24.82 20.01 16.86 9.74 7.2 25.77 23.26 23.83 71.0 61.06 40.33 0.0 0.0 41.52 40.97
    """,
    "longchat-7b-v1.5-32k": """
    20.88 29.36 43.2 33.05 24.58 14.66 30.89 22.76 26.61 66.5 83.99 40.83 0.0 30.5 54.89 59.05
    19.32 26.6 37.93 34.15 23.34 12.71 23.45 21.81 24.93 65.0 80.88 38.19 0.0 31.0 53.63 57.62
    19.28 28.81 40.26 35.31 23.75 13.44 26.3 22.29 25.73 66.0 79.93 39.59 0.0 31.0 56.05 58.61
    20.68 29.34 42.21 33.95 24.88 14.15 28.55 23.11 26.45 66.0 81.25 40.52 0.0 29.5 54.79 58.81
    19.31 28.3 37.75 30.51 23.06 11.76 27.55 21.37 26.49 66.0 75.8 39.92 0.0 25.5 53.56 55.53
    """,
    "mistral-7b-instruct-v0.2": """
    26.82 33.06 49.28 42.77 27.33 19.27 32.85 24.25 27.06 71.0 86.23 42.98 2.75 86.98 55.51 52.88
    25.54 29.51 49.25 40.94 25.7 19.42 25.89 23.82 26.11 69.5 86.48 42.06 2.98 88.56 55.65 51.87
    25.89 32.47 48.6 41.71 27.31 18.69 28.81 24.5 26.6 70.0 86.27 42.47 3.09 87.43 55.93 52.01
    26.41 33.36 49.81 42.32 27.93 18.76 30.74 24.19 27.08 71.0 86.25 43.01 2.73 86.18 55.62 52.65
    22.61 29.06 47.22 36.54 20.6 16.25 30.0 23.8 26.75 70.5 86.16 42.97 3.46 86.38 53.72 51.1
    """,
    "mixtral-8x7b-instruct-v0.1": """
    26.81 37.06 51.55 47.77 32.46 26.59 34.25 26.05 27.91 76.0 90.57 46.98 5.5 100.0 69.07 69.65
    26.01 34.65 51.58 48.23 32.67 25.92 27.77 25.0 27.25 74.5 90.42 46.48 5.5 99.5 69.02 68.98
    27.12 36.9 51.91 47.46 33.23 26.27 30.19 25.84 27.8 76.0 90.24 46.31 5.5 100.0 68.72 70.01
    26.46 37.03 52.62 47.71 33.35 26.45 32.64 25.87 27.94 75.5 90.71 47.14 5.5 100.0 68.81 69.56
    20.45 32.09 48.02 34.76 25.69 16.5 29.76 23.53 26.84 74.5 90.24 47.1 7.06 99.42 64.91 63.52
    """,
}

_MAX_PROMPT_TOKENS = {
    "lwm-text-chat-1m": 1_048_576,
    "longchat-7b-v1.5-32k": 31_500,
    "mistral-7b-instruct-v0.2": 31_500,
    "mixtral-8x7b-instruct-v0.1": 31_500,
    "llama-2-7b-chat-hf": 3_500,
    "vicuna-7b-v1.5-16k": 15_500,
}


def scores(model: str) -> dict[str, dict[str, float]]:
    """The rows of Table 1 for a model: by method, then by set; 0 to 1, empty for other models.

    Args:
        model: hub id, or a folder of that name.
    """
    if model_key(model) not in _TABLE:
        return {}
    lines = _TABLE[model_key(model)].strip().split("\n")
    return {
        method: {name: float(score) / 100 for name, score in zip(SETS, line.split(), strict=True)}
        for method, line in zip(_METHODS, lines, strict=True)
    }


def max_prompt_tokens(model: str, max_tokens: int | None) -> int | None:
    """What a prompt is cut to: the published number, or what the model's positions leave room for.

    Args:
        model: hub id, or a folder of that name.
        max_tokens: positions that the model has; None, as the result, where there is no limit.
    """
    known = _MAX_PROMPT_TOKENS.get(model_key(model))
    if known is not None or max_tokens is None:
        return known
    answer_tokens = max(one.max_new_tokens for one in SETS.values())
    return max(max_tokens - answer_tokens - _TEMPLATE_TOKENS, max_tokens // 2)


def model_key(model: str) -> str:
    """The name of a model without its owner or folder, in lower case."""
    return PurePath(model).name.lower()


_TEMPLATE_TOKENS = 256
"""Room for a chat template, and for text that has more tokens when it is read a second time."""
