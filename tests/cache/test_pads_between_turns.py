"""Batches in which a row's turn is shorter, or its answer ends early: each row as it is alone."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from snapkv import (
    H2O,
    RKV,
    TOVA,
    AdaKV,
    CacheMismatchError,
    CompressedCache,
    CriticalKV,
    ExpectedAttention,
    FastGen,
    FullCache,
    InvalidArgumentError,
    KeyDiff,
    LagKV,
    PromptThenDecode,
    PyramidKV,
    Scissorhands,
    ScoreThreshold,
    SnapKV,
    StreamingLLM,
    UnsupportedModelError,
)
from tests import families
from tests.families import random_ids, tiny_model
from tests.policies.test_evicting import DUO

CLOSE = {"atol": 2e-4, "rtol": 1e-4}
PICK = {"window_size": 8, "kernel_size": 5}

APPENDING = {
    "full": FullCache(),
    "snapkv": SnapKV(40, **PICK),
    "snapkv-ratio": SnapKV(keep_ratio=0.4, **PICK),
    "snapkv-per-query-head": SnapKV(40, group_reduce="none", **PICK),
    "pyramidkv": PyramidKV(40, **PICK),
    "adakv": AdaKV(SnapKV(40, **PICK)),
    "adakv-ratio": AdaKV(SnapKV(keep_ratio=0.4, **PICK)),
    "criticalkv": CriticalKV(SnapKV(40, **PICK)),
    "adakv-criticalkv": AdaKV(CriticalKV(SnapKV(40, **PICK))),
    "score-threshold": ScoreThreshold(SnapKV(40, **PICK), at_least=0.016),
    "expected-attention": ExpectedAttention(40, window_size=8),
    "keydiff": KeyDiff(40, window_size=8),
    "lagkv": LagKV(40, window_size=8, lag_size=9),
}
EVICTING = {
    "h2o": H2O(40),
    "tova": TOVA(40),
    "streaming-llm": StreamingLLM(40),
    "streaming-llm-original": StreamingLLM(40, positions="original"),
    "scissorhands": Scissorhands(40, history=24, recent=8),
    "scissorhands-slots": Scissorhands(40, history=6, recent=8, drop=3, threshold="slots"),
    "r-kv": RKV(40, evict_every=5),
    "r-kv-one-at-a-time": RKV(40, window_size=4, evict_every=1),
    "fastgen": FastGen(0.8, special_ids=(3, 4), punctuation_ids=(5, 6, 7)),
    "duo-attention": replace(DUO, recent_tokens=24),
    "snapkv-then-tova": PromptThenDecode(prompt=SnapKV(40, **PICK), decode=TOVA(60)),
    "snapkv-then-h2o": PromptThenDecode(prompt=SnapKV(40, **PICK), decode=H2O(48)),
}
BUDGETED = ("snapkv", "criticalkv", "keydiff", "lagkv", "snapkv-per-query-head")
PRODUCTS = [
    *((name, {}) for name in (*APPENDING, *EVICTING)),
    *((name, {"storage": "static", "room_tokens": 96}) for name in BUDGETED[:3]),
    *((name, {"quantize": bits}) for name in BUDGETED for bits in ("int8", "int4", "fp8")),
    *((name, {"turns": "compress"}) for name in BUDGETED),
    *(("snapkv", {"turns": "compress", "quantize": bits}) for bits in ("int8", "fp8")),
]  # fmt: skip
PROMPTS = [
    (70, 95, 52),
    (33, 48, 90),  # some fit the budget, not for long
    pytest.param((12, 25, 40), marks=pytest.mark.slow),
    pytest.param((21, 34, 9), marks=pytest.mark.slow),
    pytest.param((90, 61, 200, 118), marks=pytest.mark.slow),
]


class Talk:
    """Turns of a batch: prompts of different length, turns of different length, answers too."""

    def __init__(self, prompts, *, turns=3, shortest=1, seed=0):
        draw = torch.Generator().manual_seed(seed)
        self.rows = len(prompts)
        some = lambda most: torch.randint(shortest, most + 1, (self.rows,), generator=draw).tolist()  # noqa: E731 # a drawing
        self.asked = [list(prompts), *(some(14) for _ in range(turns - 1))]
        self.answered = [some(6) for _ in range(turns)]
        self.asked_ids = [
            [random_ids(1, n, seed + 97 * turn + row) for row, n in enumerate(counts)]
            for turn, counts in enumerate(self.asked)
        ]
        self.answered_ids = [
            [random_ids(1, n, seed + 31 * turn + row + 7) for row, n in enumerate(counts)]
            for turn, counts in enumerate(self.answered)
        ]


def positions_of(mask):
    return (mask.cumsum(-1) - 1).clamp(min=0)


@torch.no_grad()
def read(model, cache, ids, mask):
    """One forward pass: the logits of the new tokens."""
    cache.expect_tokens(ids)
    new = positions_of(mask)[:, -ids.shape[1] :]
    return model(ids, past_key_values=cache, attention_mask=mask, position_ids=new).logits


def announce(cache, tokens):
    cache.expect_prompt(cache.get_seq_length() + tokens)


def alone(model, policy, options, talk, row):
    """The logits of every pass of one row by itself."""
    cache, passes, seen = CompressedCache(model, policy, **options), [], 0
    for asked, answered in zip(talk.asked_ids, talk.answered_ids, strict=True):
        announce(cache, asked[row].shape[1])
        for ids in (asked[row], *answered[row].split(1, dim=1)):
            seen += ids.shape[1]
            passes.append(read(model, cache, ids, torch.ones(1, seen, dtype=torch.int64)))
    return passes, cache


def together(model, cache, talk, *, told):
    """The logits of the same passes of all rows at once; of pads nothing.

    An answer that has ended is followed by pads: "at once", since the mask hides them as they come,
    or "later", since the mask of the next turn does.
    """
    mask = torch.empty(talk.rows, 0, dtype=torch.int64)
    passes = [[] for _ in range(talk.rows)]
    for asked, answered in zip(talk.asked_ids, talk.answered_ids, strict=True):
        longest = max(ids.shape[1] for ids in asked)
        ids = torch.cat([pad(own, longest, front=True) for own in asked])
        mask = torch.cat([mask, (ids > 0).long()], dim=1)
        announce(cache, longest)
        logits = read(model, cache, ids, mask)
        for row, own in enumerate(asked):
            passes[row].append(logits[row : row + 1, longest - own.shape[1] :])
        longest = max(ids.shape[1] for ids in answered)
        ids = torch.cat([pad(own, longest, front=False) for own in answered])
        for step in range(longest):
            real = (ids[:, step : step + 1] > 0).long()
            shown = real if told == "at once" else torch.ones_like(real)
            mask = torch.cat([mask, shown], dim=1)
            logits = read(model, cache, ids[:, step : step + 1], mask)
            for row in range(talk.rows):
                if real[row]:
                    passes[row].append(logits[row : row + 1])
        mask[:, mask.shape[1] - longest :] = (ids > 0).long()
    return passes


def pad(ids, tokens, *, front):
    missing = tokens - ids.shape[1]
    return torch.nn.functional.pad(ids, (missing, 0) if front else (0, missing))


def require_as_alone(model, policy, options, talk, *, told):
    cache = CompressedCache(model, policy, **options)
    passes = together(model, cache, talk, told=told)
    for row in range(talk.rows):
        expected, own = alone(model, policy, options, talk, row)
        for found, wanted in zip(passes[row], expected, strict=True):
            torch.testing.assert_close(found, wanted, **CLOSE)
        for layer in cache.compressed_layers if told == "at once" else ():
            require_same_tokens(cache.kept_positions(layer)[row], own.kept_positions(layer)[0])


def require_same_tokens(found, expected):
    """One set per query head where some row was compressed so, one per KV head in rows that fit."""
    expected = expected.repeat_interleave(max(1, len(found) // len(expected)), dim=0)
    found = found.repeat_interleave(max(1, len(expected) // len(found)), dim=0)
    for head, own in zip(found, expected, strict=True):
        assert head[head >= 0].tolist() == own[own >= 0].tolist()


def ids_of(case):
    name, options = case
    return "-".join([name, *(str(value) for value in options.values())])


WITH_WINDOWS = [case for case in families.CASES if case[0] in ("gemma3_text", "gemma2", "gpt_oss")]
WITHOUT_WINDOWS = [
    pytest.param(*case, marks=() if case[0] in ("qwen3", "deepseek_v3") else pytest.mark.slow)
    for case in families.CASES
    if case not in WITH_WINDOWS and case[0] != "cohere2"
]
CASES = [pytest.param(*case, id=ids_of(case)) for case in PRODUCTS]
METHODS = APPENDING | EVICTING


prompts_of = pytest.mark.parametrize("prompts", PROMPTS, ids=lambda n: "x".join(map(str, n)))


def talk_of(prompts, options, seed):
    """Few bits go by groups of neighbours, which differ where a row of the batch is too short."""
    more = 40 if "quantize" in options else 0
    return Talk([tokens + more for tokens in prompts], seed=seed)


@prompts_of
@pytest.mark.parametrize(("name", "options"), CASES)
def test_rows_whose_turns_differ_in_length_are_as_alone(name, options, prompts):
    talk = talk_of(prompts, options, sum(prompts))
    require_as_alone(tiny_model("llama"), METHODS[name], options, talk, told="at once")


def refusal(run):
    """What `run` was refused with, or None."""
    try:
        run()
    except (UnsupportedModelError, InvalidArgumentError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("prompts", PROMPTS[1:], ids=lambda n: "x".join(map(str, n)))
@pytest.mark.parametrize(("name", "options"), CASES)
def test_answers_that_turn_out_to_have_ended_are_as_alone_or_refused(name, options, prompts):
    """What a method has counted or dropped by a pad's attention cannot be taken back."""
    talk = talk_of(prompts, options, 1)
    error = refusal(
        lambda: require_as_alone(tiny_model("llama"), METHODS[name], options, talk, told="later")
    )
    if error is not None:
        assert name in EVICTING or "turns" in options
        assert "attention_mask: expected tokens that" in error


@pytest.mark.parametrize(
    "name",
    ["snapkv", "pyramidkv", "adakv", "h2o", "scissorhands", "r-kv", "fastgen", "duo-attention"],
)
@pytest.mark.parametrize(("family", "implementation"), WITHOUT_WINDOWS)
def test_rows_are_as_alone_in_every_family(family, implementation, name):
    model, talk = tiny_model(family, implementation), Talk((70, 95, 33), turns=2, seed=3)
    require_as_alone(model, METHODS[name], {}, talk, told="at once")


class OwnOfTransformers(DynamicCache):
    def expect_prompt(self, prompt_tokens):
        pass

    def expect_tokens(self, token_ids):
        pass


@pytest.mark.parametrize(("family", "implementation"), WITH_WINDOWS)
def test_sliding_windows_count_pads_as_those_of_transformers_do(family, implementation):
    model, talk = tiny_model(family, implementation), Talk((70, 95, 33), seed=3)
    expected = together(model, OwnOfTransformers(config=model.config), talk, told="at once")
    found = together(model, CompressedCache(model, FullCache()), talk, told="at once")
    for own, row in zip(found, expected, strict=True):
        for ours, theirs in zip(own, row, strict=True):
            torch.testing.assert_close(ours, theirs, **CLOSE)


# A small random model says one token again and again, unless it must not.
GREEDY = {
    "max_new_tokens": 8,
    "do_sample": False,
    "no_repeat_ngram_size": 1,
    "suppress_tokens": [0],
}


def conversation(model, cache, prompts, turns, ends):
    """What `generate` says turn by turn: the tokens and the scores of every row until its end."""
    rows, said = len(prompts), [[] for _ in prompts]
    ids, mask = torch.empty(rows, 0, dtype=torch.int64), torch.empty(rows, 0, dtype=torch.int64)
    for asked in [prompts, *turns]:
        longest = max(own.shape[1] for own in asked)
        new = torch.cat([pad(own, longest, front=True) for own in asked])
        ids, mask = torch.cat([ids, new], 1), torch.cat([mask, (new > 0).long()], 1)
        output = model.generate(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            eos_token_id=ends,
            pad_token_id=0,
            **GREEDY,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new = output.sequences[:, ids.shape[1] :]
        ended = torch.isin(new, torch.tensor(ends)).long()
        real = (ended.cumsum(1) - ended) == 0
        for row in range(rows):
            logits = torch.stack([step[row] for step in output.logits])
            said[row].append((new[row][real[row]].tolist(), logits[real[row]]))
        ids, mask = output.sequences, torch.cat([mask, real.long()], dim=1)
    return said


@pytest.mark.parametrize(("name", "options"), CASES)
def test_answers_that_end_early_in_generate_are_as_alone_or_refused(name, options):
    model, policy = tiny_model("llama"), METHODS[name]
    prompts = [random_ids(1, tokens, 5 + tokens) for tokens in (61, 90)]
    turns = [[random_ids(1, n, 40 + n), random_ids(1, m, m)] for n, m in ((5, 11), (9, 3))]
    first = CompressedCache(model, policy, **options)
    answer = model.generate(prompts[0], past_key_values=first, pad_token_id=0, **GREEDY)
    ends = [int(answer[0, prompts[0].shape[1] + 2])]  # the third token of the first row's answer

    def said(rows):
        cache = CompressedCache(model, policy, **options)
        chosen = [[turn[row] for row in rows] for turn in turns]
        return conversation(model, cache, [prompts[row] for row in rows], chosen, ends)

    if name in EVICTING:
        assert "attention_mask: expected tokens that" in refusal(lambda: said([0, 1]))
        return
    both = said([0, 1])
    assert len(both[0][0][0]) == 3 < len(both[1][0][0])
    for row in (0, 1):
        for found, alone in zip(both[row], said([row])[0], strict=True):
            assert found[0] == alone[0]
            torch.testing.assert_close(found[1], alone[1], **CLOSE)


def after_a_gap(name, options, *, family="llama"):
    """A cache behind a prompt and a turn with pads, the mask so far, and what may come next."""
    model, policy = tiny_model(family), METHODS[name]
    cache, mask = CompressedCache(model, policy, **options), torch.ones(2, 90, dtype=torch.int64)
    mask[0, :13] = 0
    read(model, cache, random_ids(2, 90), mask)
    turn = torch.ones(2, 9, dtype=torch.int64)
    turn[0, :4] = turn[1, 7:] = 0
    mask = torch.cat([mask, turn], dim=1)
    announce(cache, 9)
    read(model, cache, random_ids(2, 9, 1), mask)
    return model, cache, mask


def go_on(model, cache, mask, ids):
    """The logits of tokens that follow one by one."""
    logits = []
    for token in ids.split(1, dim=1):
        mask = torch.cat([mask, torch.ones_like(token)], dim=1)
        logits.append(read(model, cache, token, mask))
    return torch.cat(logits, dim=1)


NEXT = random_ids(2, 3, 2)
CROPPABLE = [case for case in CASES if case.values[0] in APPENDING]


@pytest.mark.parametrize(("name", "options"), CROPPABLE)
def test_tokens_behind_a_gap_can_be_taken_back(name, options):
    model, cache, mask = after_a_gap(name, options)
    expected = go_on(model, copy.deepcopy(cache), mask, NEXT)
    more = random_ids(2, 4, 3)
    go_on(model, cache, mask, more)
    cache.crop(-4)
    torch.testing.assert_close(go_on(model, cache, mask, NEXT), expected, **CLOSE)


@pytest.mark.parametrize(("name", "options"), CROPPABLE)
def test_a_turn_with_a_gap_can_be_taken_back_or_is_refused(name, options):
    model, cache, mask = after_a_gap(name, options)
    before = CompressedCache(model, METHODS[name], **options)
    read(model, before, random_ids(2, 90), mask[:, :90])
    expected = go_on(model, before, mask[:, :90], NEXT)
    if "turns" in options or name.startswith(("adakv", "score-threshold")):
        assert "tokens_to_remove: expected at most" in refusal(lambda: cache.crop(-9))
        return
    cache.crop(-9)
    torch.testing.assert_close(go_on(model, cache, mask[:, :90], NEXT), expected, **CLOSE)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_rows_with_gaps_can_be_put_in_another_order(name, options):
    model, cache, mask = after_a_gap(name, options)
    expected = go_on(model, copy.deepcopy(cache), mask, NEXT).flip(0)
    cache.reorder_cache(torch.tensor([1, 0]))
    found = go_on(model, cache, mask.flip(0), NEXT.flip(0))
    torch.testing.assert_close(found, expected, **CLOSE)
    _, cache, mask = after_a_gap(name, options)
    cache.batch_select_indices(torch.tensor([1]))
    found = go_on(model, cache, mask[1:], NEXT[1:])
    torch.testing.assert_close(found, expected[:1], **CLOSE)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_gaps_are_saved_with_a_cache(name, options, tmp_path):
    model, cache, mask = after_a_gap(name, options)
    cache.save(tmp_path / "cache.safetensors")
    loaded = CompressedCache.load(tmp_path / "cache.safetensors", model, policy=METHODS[name])
    for layer in cache.compressed_layers:
        assert torch.equal(loaded.kept_positions(layer), cache.kept_positions(layer))
    found, expected = (go_on(model, each, mask, NEXT) for each in (loaded, cache))
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_cache_with_gaps_that_is_emptied_is_as_new(name, options):
    model, cache, _ = after_a_gap(name, options)
    cache.reset()
    talk = Talk((70, 52), turns=1)
    found = together(model, cache, talk, told="at once")
    expected, _ = alone(model, METHODS[name], options, talk, 0)
    for ours, own in zip(found[0], expected, strict=True):
        torch.testing.assert_close(ours, own, **CLOSE)


def test_pads_between_turns_are_refused_where_turns_are_recalled():
    model = tiny_model("llama")
    cache, mask = CompressedCache(model, METHODS["snapkv"], recall="host"), torch.ones(2, 95)
    read(model, cache, random_ids(2, 90), mask[:, :90])
    mask[0, 90:92] = 0
    announce(cache, 5)
    with pytest.raises(UnsupportedModelError, match=r"attention_mask.*recall='host'"):
        read(model, cache, random_ids(2, 5), mask)


@pytest.mark.parametrize("name", EVICTING)
def test_what_evicts_takes_nothing_back(name):
    model = tiny_model("llama")
    cache, ids = CompressedCache(model, METHODS[name]), random_ids(1, 90)
    read(model, cache, ids, torch.ones_like(ids))
    go_on(model, cache, torch.ones_like(ids), random_ids(1, 3))
    with pytest.raises(InvalidArgumentError, match=rf"tokens_to_remove.*{METHODS[name].name}"):
        cache.crop(-2)


# Products that nobody had tried.

SNAPKV_LIKE = [
    "snapkv",
    "snapkv-per-query-head",
    "pyramidkv",
    "adakv",
    "criticalkv",
    "keydiff",
    "lagkv",
]


def turns_of(model, cache, turns):
    """The logits of turns of a batch, each (ids, pads in front of each row), or in pieces."""
    mask, found = torch.empty(len(turns[0][1]), 0, dtype=torch.int64), []
    for ids, pads, *pieces in turns:
        real = torch.arange(ids.shape[1]) >= torch.tensor(pads)[:, None]
        announce(cache, ids.shape[1])
        for piece, seen in zip(
            ids.split(pieces or ids.shape[1], 1), real.split(pieces or ids.shape[1], 1), strict=True
        ):
            mask = torch.cat([mask, seen.long()], dim=1)
            found.append(read(model, cache, piece, mask))
    return found


def require_row_as_alone(name, options, turns, row):
    """Also where the row has no token of its own in some turn, which is then none of it."""
    model, policy = tiny_model("llama"), METHODS[name]
    cache, own = (CompressedCache(model, policy, **options) for _ in range(2))
    found = torch.cat(turns_of(model, cache, turns), dim=1)[row : row + 1]
    real = torch.cat([torch.arange(ids.shape[1]) >= pads[row] for ids, pads, *_ in turns])
    single = [(ids[row : row + 1, pads[row] :], (0,)) for ids, pads, *_ in turns]
    expected = turns_of(model, own, [turn for turn in single if turn[0].shape[1]])
    torch.testing.assert_close(found[:, real], torch.cat(expected, dim=1), **CLOSE)
    return cache, own


@pytest.mark.parametrize("options", [{}, {"quantize": "fp8"}, {"turns": "compress"}], ids=str)
@pytest.mark.parametrize("name", SNAPKV_LIKE)
def test_one_row_with_pads_between_its_turns_is_compressed_as_without(name, options):
    if name in ("pyramidkv", "adakv") and options:
        pytest.skip("refused: heads or layers keep numbers of their own")
    turns = [(random_ids(1, 10), (0,)), (random_ids(1, 6, 1), (2,)), (random_ids(1, 60, 2), (0,))]
    cache, own = require_row_as_alone(name, options, turns, 0)
    assert cache.report().kept_tokens == own.report().kept_tokens < 74


@pytest.mark.parametrize("pads", [(0, 0), (10, 0), (0, 38)], ids=str)
@pytest.mark.parametrize("name", SNAPKV_LIKE)
def test_a_short_row_votes_with_all_of_a_turn_that_comes_in_pieces(name, pads):
    turns = [(random_ids(2, 90), (70, 0)), (random_ids(2, 40, 1), pads, 37, 3)]
    require_row_as_alone(name, {}, turns, 0)


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("name", BUDGETED)
def test_a_row_without_a_token_in_a_turn_does_not_vote(name, row):
    turns = [
        (random_ids(2, 90), (0, 0)),
        (random_ids(2, 9, 1), (9, 0)),
        (random_ids(2, 9, 2), (0, 3)),
    ]
    require_row_as_alone(name, {"turns": "compress"}, turns, row)


@pytest.mark.parametrize("name", SNAPKV_LIKE)
def test_a_short_row_that_goes_on_alone_is_compressed(name):
    model, policy = tiny_model("llama"), METHODS[name]
    cache, own = CompressedCache(model, policy), CompressedCache(model, policy)
    ids, later = random_ids(2, 90), random_ids(1, 40, 1)
    turns_of(model, cache, [(ids, (70, 0))])
    cache.batch_select_indices(torch.tensor([0]))
    announce(cache, 40)
    mask = torch.cat([torch.arange(90)[None] >= 70, torch.ones(1, 40, dtype=torch.bool)], dim=1)
    found = read(model, cache, later, mask.long())
    expected = turns_of(model, own, [(ids[:1, 70:], (0,)), (later, (0,))])[-1]
    torch.testing.assert_close(found, expected, **CLOSE)
    for layer in range(4):
        require_same_tokens(cache.kept_positions(layer)[0], own.kept_positions(layer)[0])


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_another_batch_behind_a_prompt_is_refused_by_name(rows):
    model, cache, _ = after_a_gap("snapkv", {})
    with pytest.raises(CacheMismatchError, match="expected a batch of 2"):
        read(model, cache, random_ids(rows, 1), torch.ones(rows, 100, dtype=torch.int64))


def test_all_that_was_read_can_be_taken_back():
    model, cache = tiny_model("llama"), CompressedCache(tiny_model("llama"), FullCache())
    turns_of(model, cache, [(random_ids(2, 25), (15, 0)), (random_ids(2, 6, 1), (3, 0))])
    cache.crop(-31)
    again = [(random_ids(2, 60, 2), (0, 25))]
    found = turns_of(model, cache, again)
    expected = turns_of(model, CompressedCache(model, FullCache()), again)
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("options", [{}, {"storage": "static", "room_tokens": 96}], ids=str)
@pytest.mark.parametrize("later", ["without a mask", "all ones"])
def test_a_pad_stays_a_pad(options, later):
    model, cache, mask = after_a_gap("snapkv", options)
    expected = go_on(model, copy.deepcopy(cache), mask, NEXT)
    found, whole = [], torch.cat([mask, torch.ones_like(NEXT)], dim=1)
    for number, token in enumerate(NEXT.split(1, dim=1)):
        seen = mask.shape[1] + number + 1
        given = None if later == "without a mask" else torch.ones(2, seen)
        positions = positions_of(whole[:, :seen])[:, -1:]
        with torch.no_grad():
            output = model(
                token, past_key_values=cache, attention_mask=given, position_ids=positions
            )
        found.append(output.logits)
    torch.testing.assert_close(torch.cat(found, dim=1), expected, **CLOSE)


def test_a_mask_of_ones_own_is_refused_behind_pads_between_turns():
    model, cache, mask = after_a_gap("adakv", {})
    own = torch.zeros(2, 1, 1, mask.shape[1] + 1)
    with pytest.raises(UnsupportedModelError, match="attention_mask: expected a 2-D mask"):
        model(NEXT[:, :1], past_key_values=cache, attention_mask=own)


def test_a_mask_that_is_too_short_is_refused_unless_it_hides_nothing():
    model, cache, mask = after_a_gap("snapkv", {})
    mask = torch.cat([mask, torch.ones_like(NEXT[:, :1])], dim=1)
    with pytest.raises(UnsupportedModelError, match="expected a column for each of 100 tokens"):
        model(NEXT[:, :1], past_key_values=cache, attention_mask=mask[:, :-1])
    positions, ones = positions_of(mask)[:, -1:], torch.ones(2, 1, dtype=torch.int64)
    expected = read(model, copy.deepcopy(cache), NEXT[:, :1], mask)
    with torch.no_grad():
        found = model(
            NEXT[:, :1], past_key_values=cache, attention_mask=ones, position_ids=positions
        )
    torch.testing.assert_close(found.logits, expected, **CLOSE)
