"""Padding is read from every form of attention mask, and masks over the stored slots are built."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from snapkv.errors import InvalidArgumentError, UnsupportedModelError
from snapkv.hf.masks import _flex_mask, leading_pads, stored_mask
from tests.pairs import pairs

T, WINDOW = 7, 3
PADS = [2, 0, 5]
FORMS = ["2-D", "bool", "additive -inf", "bf16", "bf16 -1e4", "block"]
FORMS_4D = FORMS[1:5]


def columns_visible(pads=PADS, tokens=T):
    """Return the visible columns of a left-padded batch, (B, T) bool."""
    return torch.tensor([[column >= own for column in range(tokens)] for own in pads])


def causal(visible, queries=None):
    """Return a causal mask, (B, 1, Q, T) bool, in which padding queries see nothing."""
    tokens = visible.shape[1]
    square = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    allowed = square & visible[:, None, None, :]
    return allowed[:, :, -(queries or tokens) :]


def in_form(form, visible):
    """Return the mask of a prompt in the form that an attention implementation receives."""
    allowed = causal(visible)
    if form == "2-D":
        return visible.long()
    if form == "block":
        return create_block_mask(
            lambda batch, head, query, column: (column <= query) & visible[batch, column],
            visible.shape[0],
            None,
            visible.shape[1],
            visible.shape[1],
            device="cpu",
        )
    return as_additive(form, allowed)


def as_additive(form, allowed):
    if form == "bool":
        return allowed
    dtype = torch.bfloat16 if "bf16" in form else torch.float32
    lowest = {"additive -inf": float("-inf"), "bf16 -1e4": -1e4}.get(form, torch.finfo(dtype).min)
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, lowest)


def read(mask, *, tokens=T, window=WINDOW):
    return leading_pads(mask, tokens - 1, tokens, window)


@pytest.mark.parametrize("form", FORMS)
def test_leading_pads_are_counted_for_each_row(form):
    assert read(in_form(form, columns_visible())).tolist() == PADS
    assert read(in_form(form, columns_visible([0, 0, 0]))) is read(None) is None


ELSEWHERE = {
    "right padding": [1, 1, 1, 1, 1, 0, 0],
    "hole": [1, 1, 0, 1, 1, 1, 1],
    "hole behind pads": [0, 0, 1, 0, 1, 1, 1],
}


@pairs(form=FORMS, row=ELSEWHERE)
def test_padding_that_is_not_on_the_left_is_refused(form, row):
    visible = torch.tensor([row, [1] * 7], dtype=torch.bool)
    with pytest.raises(UnsupportedModelError, match=r"attention_mask.*padding_side='left'"):
        read(in_form(form, visible))


@pytest.mark.parametrize("form", FORMS)
def test_a_row_of_padding_alone_is_refused(form):
    with pytest.raises(
        InvalidArgumentError, match=r"got rows of padding alone\. Leave these rows out"
    ):
        read(in_form(form, columns_visible([0, T])))


@pytest.mark.parametrize("form", FORMS[:2])
def test_a_mask_of_fewer_columns_than_tokens_is_refused(form):
    mask = in_form(form, columns_visible())
    with pytest.raises(
        UnsupportedModelError, match=f"for each of the {T + 1} tokens, but got {T} columns. Pass"
    ):
        leading_pads(mask, T - 1, T + 1, WINDOW)


NOT_CAUSAL = {  # queries, columns, whether they are seen
    "sees ahead": (slice(-WINDOW, None), slice(-WINDOW, None), True),
    "loses the prefix, as a document of its own": (-WINDOW, slice(T - WINDOW), False),
    "misses one position": (-2, 1, False),
}


@pytest.mark.parametrize("form", FORMS_4D)
@pytest.mark.parametrize(("queries", "columns", "seen"), NOT_CAUSAL.values(), ids=NOT_CAUSAL)
def test_mask_that_is_not_causal_in_observation_window_is_refused(form, queries, columns, seen):
    allowed = causal(columns_visible([0, 0]))
    read(as_additive(form, allowed))
    allowed[:, :, queries, columns] = seen
    with pytest.raises(UnsupportedModelError, match="attention_mask: expected a causal mask"):
        read(as_additive(form, allowed))


@pytest.mark.parametrize("form", FORMS_4D)
def test_mask_must_be_causal_only_for_voting_queries(form):
    """Earlier queries do not vote; the tokens of an image prefix may attend in both directions."""
    allowed = causal(columns_visible([0, 0]))
    allowed[:, :, : T - WINDOW, : T - WINDOW] = True
    assert read(as_additive(form, allowed)) is None
    with pytest.raises(UnsupportedModelError):
        read(as_additive(form, allowed), window=T)


@pytest.mark.parametrize("form", FORMS_4D)
def test_padding_queries_may_attend_to_any_column(form):
    """transformers unmasks padding queries in some masks, because softmax fails on an empty row."""
    allowed = causal(columns_visible())
    allowed[2, :, :5] = True
    assert read(as_additive(form, allowed)).tolist() == PADS


# Masks over what is stored.

SLOTS, HIDDEN = 7, torch.tensor([2, 0])
EXPECTED = torch.tensor(
    [
        [[0, 0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1, 1]],
        [[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]],
    ],
    dtype=torch.bool,
)
"""(B, Q, S + Q): a new token sees the visible stored tokens and the new tokens up to itself."""


def queries(dtype=torch.float32, tokens=3, batch=2):
    return torch.zeros(batch, 4, tokens, 8, dtype=dtype)


def test_the_stored_mask_of_sdpa_is_boolean():
    mask = stored_mask("sdpa", HIDDEN, SLOTS, queries())
    assert mask.dtype == torch.bool
    assert torch.equal(mask, EXPECTED[:, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stored_mask_of_eager_is_additive(dtype):
    mask = stored_mask("eager", HIDDEN, SLOTS, queries(dtype))
    assert mask.dtype == dtype
    assert torch.equal(mask == 0, EXPECTED[:, None])
    assert torch.equal(mask == torch.finfo(dtype).min, ~EXPECTED[:, None])


def test_the_stored_mask_of_flash_is_two_dimensional():
    mask = stored_mask("flash_attention_2", HIDDEN, SLOTS, queries())
    assert mask.tolist() == [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]]
    assert stored_mask("flash_attention_2", None, SLOTS, queries()) is None


def test_the_stored_mask_of_flex_is_block_mask_that_hides_same_slots():
    mask = stored_mask("flex_attention", HIDDEN, SLOTS, queries())
    assert mask.shape == (2, 1, 3, 7)
    dense = create_mask(mask.mask_mod, 2, 1, 3, 7, device="cpu")
    assert torch.equal(dense[:, 0], EXPECTED)


def test_flex_mask_counts_queries_and_slots_from_zero():
    """transformers passes offsets into the text, but attention counts from zero."""

    def make(mask_function, attention_mask):
        assert attention_mask.shape == (1, 7)
        return create_block_mask(mask_function, 1, None, 3, 7, device="cpu")

    mask = _flex_mask(
        make,
        q_offset=14,
        kv_offset=10,
        mask_function=lambda batch, head, query, slot: slot <= query,
        attention_mask=torch.ones(1, 17),
    )
    dense = create_mask(mask.mask_mod, 1, 1, 3, 7, device="cpu")
    assert torch.equal(dense[0, 0], torch.ones(3, 7, dtype=torch.bool).tril(4))
