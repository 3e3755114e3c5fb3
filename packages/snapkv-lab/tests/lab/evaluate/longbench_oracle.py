"""LongBench's metrics once more, step by step as its paper's code takes them; slow and plain.

Written from the published definitions, for the tests to judge `snapkv_lab.evaluate.metrics` by.
"""

import difflib
import re
import string
from collections import Counter


def qa_f1(prediction, truth):
    def tokens(text):
        text = "".join(c for c in text.lower() if c not in set(string.punctuation))
        text = re.sub(r"\b(a|an|the)\b", " ", text)
        return " ".join(text.split()).split()

    said, right = tokens(prediction), tokens(truth)
    shared = sum((Counter(said) & Counter(right)).values())
    if shared == 0:
        return 0
    precision = 1.0 * shared / len(said)
    recall = 1.0 * shared / len(right)
    return (2 * precision * recall) / (precision + recall)


def classification(prediction, truth, classes):
    matches = []
    for name in classes:
        if name in prediction:
            matches.append(name)
    index = 0  # what a for loop over a list that shrinks under it does
    while index < len(matches):
        match = matches[index]
        if match in truth and match != truth:
            matches.remove(match)
        index += 1
    return 1.0 / len(matches) if truth in matches else 0.0


def numbers_that_match(prediction, wanted):
    numbers = re.findall(r"\d+", prediction)
    right = 0
    for number in numbers:
        if str(number) == str(wanted):
            right += 1
    return 0.0 if len(numbers) == 0 else float(right / len(numbers))


def retrieval(prediction, truth):
    return numbers_that_match(prediction, re.findall(r"Paragraph (\d+)", truth)[0])


def code_line(prediction):
    for line in prediction.lstrip("\n").split("\n"):
        if ("`" not in line) and ("#" not in line) and ("//" not in line):
            return line
    return ""


def fuzz_ratio(first, second):
    """`fuzzywuzzy.fuzz.ratio` without python-Levenshtein: a whole number of percents."""
    if first == second:
        return 100
    if len(first) == 0 or len(second) == 0:
        return 0
    return round(100 * difflib.SequenceMatcher(None, first, second).ratio())


def code_similarity(prediction, truth):
    return fuzz_ratio(code_line(prediction), truth) / 100
