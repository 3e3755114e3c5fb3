"""Shortened sequences that failed earlier. The comment above each one says what was wrong."""

import snapkv as kv
from tests.gates import drawn_gate
from tests.sequences import operations as do

HOST = {"recall": "host"}
FITS = kv.SnapKV(18, window_size=6)


def llama(policy, operations, options=None):
    return do.Sequence("llama", policy, operations, options or {})


CASES = {
    # Query heads that share out a budget could be gathered from another group, unnoticed.
    "adakv of query heads": llama(
        kv.AdaKV(kv.SnapKV(20, window_size=4, group_reduce="none")),
        (do.Turn(40, pads=(0, 7)), do.Step(2), do.Turn(6)),
    ),
    # What stands behind a dropped span could have any position, unnoticed.
    "a turn behind dropped spans": llama(
        kv.SnapKV(20, window_size=4),
        (do.Turn(40), do.Drop(((3, 9), (15, 16))), do.Step(2), do.Drop(((20, 22),)), do.Turn(6)),
        HOST,
    ),
    # The end of a prompt that was cropped chose among the stored slots, not all that was seen.
    "crop into a prompt under recall": llama(
        kv.SnapKV(keep_ratio=0.2, window_size=12), (do.Turn(80), do.Crop(2), do.Step(3)), HOST
    ),
    # A crop recalled in the layers whose tail was too short, and not in the others.
    "crop further than some layers' tail": llama(
        kv.SnapKV(20, window_size=2), (do.Turn(33), do.Crop(3), do.Step(3)), HOST
    ),
    # A file of a cache in the middle of a turn could forget what must be restored, unnoticed.
    "a file in the middle of a turn under recall": llama(
        kv.SnapKV(20, window_size=2),
        (do.Turn(33), do.Begin(5, 12), do.Save(), do.Turn(7), do.Step(3)),
        HOST,
    ),
    # transformers' own layers refused behind compressed ones that had changed.
    "crop beside sliding layers": do.Sequence(
        "sliding", kv.SnapKV(20, window_size=2), (do.Turn(60), do.Step(3), do.Crop(2))
    ),
    "crop beside linear layers": do.Sequence(
        "linear", kv.SnapKV(20, window_size=2), (do.Turn(60), do.Step(3), do.Crop(2))
    ),
    "repeat rows beside linear layers": do.Sequence(
        "linear",
        kv.SnapKV(20, window_size=2),
        (do.Turn(30), do.Rows("batch_repeat_interleave", (2,))),
    ),
    "select rows beside linear layers": do.Sequence(
        "linear",
        kv.SnapKV(20, window_size=2),
        (do.Turn(30, pads=(0, 0)), do.Rows("batch_select_indices", (0,))),
    ),
    # States that are emptied by filling in zeros keep their number of rows.
    "other rows after a reset beside linear layers": do.Sequence(
        "linear", kv.SnapKV(20, window_size=2), (do.Turn(30, pads=(0, 0)), do.Reset(), do.Turn(30))
    ),
    # A later turn that is read layer by layer was evicted from behind every piece.
    "tova, a turn by layers": llama(kv.TOVA(8), (do.Turn(10), do.Turn(10, how="layers", piece=3))),
    "h2o, a turn by layers": llama(kv.H2O(8), (do.Turn(10), do.Turn(10, how="layers", piece=3))),
    "scissorhands, a turn by layers": llama(
        kv.Scissorhands(24, history=6, recent=4), (do.Turn(1), do.Turn(25, how="layers", piece=1))
    ),
    # A turn that is announced again in its midst was counted from there.
    "h2o, a turn that is announced twice": llama(
        kv.H2O(16), (do.Turn(1), do.Begin(1, of=2), do.Turn(1, how="generate"))
    ),
    # The mask of all layers was cut as if it were of one that stores fewer tokens than the first.
    "fastgen, a turn by layers of other widths": llama(
        kv.FastGen(0.8, special_ids=(3, 4), punctuation_ids=(5, 6, 7)),
        (do.Turn(13), do.Turn(3, how="layers", piece=2)),
    ),
    # What was saved could not be loaded.
    "fastgen with its own tokens, saved": llama(
        kv.FastGen(0.5, special_ids=(3, 4), punctuation_ids=(5, 6, 7)), (do.Turn(10), do.Save())
    ),
    # The first layer had dropped its pads, so there was no mask for those that had dropped nothing.
    "a later turn of a layer that is whole, pads in it": do.Sequence(
        "qk-norm",
        kv.AdaKV(
            kv.SnapKV(
                kv.AutoBudget(lost_vote=0.01, least=4),
                window_size=4,
                kernel_size=1,
                pooling="avg",
                group_reduce="max",
            )
        ),
        (do.Turn(43, pads=(0, 1, 0)), do.Turn(1)),
    ),
    # Nothing was dropped by the first turn; the mask of the next one had another width.
    "codes with recall, a later turn in pieces": llama(
        FITS, (do.Turn(1), do.Turn(4, how="pieces", piece=2)), {**HOST, "quantize": "int8"}
    ),
    # Refused where the first layer had read and dropped already.
    "codes of heads that differ in length": llama(
        kv.AdaKV(kv.SnapKV(20, window_size=4)), (do.Turn(30),), {"quantize": "int8"}
    ),
    "fastgen by layers, beside sliding layers": do.Sequence(
        "sliding",
        kv.FastGen(0.5, special_ids=(3, 4), punctuation_ids=(5, 6, 7)),
        (do.Turn(30, how="layers", piece=8),),
    ),
    "expected-attention, a turn behind one that fitted": llama(
        kv.ExpectedAttention(keep_ratio=0.1, window_size=2, sink_tokens=1), (do.Turn(2), do.Turn(6))
    ),
    "query heads of a shared latent": do.Sequence(
        "latent", kv.SnapKV(10, window_size=4, group_reduce="none"), (do.Turn(30), do.Step(2))
    ),
    # The slots of the row that keeps most were counted, so that another one was left with nothing.
    "crop of all that a row keeps": do.Sequence(
        "latent",
        kv.SnapKV(kv.AutoBudget(lost_vote=0.2, least=1, most=8), window_size=6, kernel_size=5),
        (do.Turn(10, pads=(0, 2)), do.Crop(6)),
    ),
    # What was left of codes that were cropped counted as held as it came.
    "crop into codes of all that was seen, under recall": llama(
        kv.Random(28, window_size=8), (do.Turn(2), do.Crop(1)), {**HOST, "quantize": "int8"}
    ),
    # Of tokens that had become codes behind a prompt, recall brought back none.
    "codes of what was generated, under recall": llama(
        FITS, (do.Turn(30), do.Step(40, together=True), do.Turn(3)), {**HOST, "quantize": "int8"}
    ),
    # Slots of pads counted as held, when heads held none any more.
    "codes of a row shorter than the window beside a longer one": llama(
        kv.SnapKV(keep_ratio=0.4, window_size=6),
        (do.Turn(40, pads=(37, 0)), do.Turn(10)),
        {"quantize": "int8"},
    ),
    # The slots of a longer row that is gone were not counted any more.
    "codes of a row behind a longer one that is gone": llama(
        kv.SnapKV(8, window_size=4),
        (do.Turn(10, pads=(0, 4)), do.Rows("reorder_cache", (1,)), do.Turn(17)),
        {"quantize": "int8"},
    ),
    # The row that had codes was gone, and its slots were read out of nothing.
    "codes of no token": llama(
        kv.KeyDiff(10, window_size=8),
        (do.Turn(5, pads=(4, 0)), do.Rows("batch_select_indices", (0,)), do.Turn(4)),
        {"quantize": "int8"},
    ),
    # A pass was refused behind linear layers whose states had gone on.
    "query heads of a latent behind linear layers": do.Sequence(
        "linear latent",
        kv.SnapKV(14, window_size=4, group_reduce="none"),
        (do.Turn(30, pads=(0, 8)), do.Turn(9)),
    ),
    # transformers forgets Jamba's state where several tokens follow others.
    **{
        f"a state that is forgotten, {how}": do.Sequence(
            "mamba beside", kv.SnapKV(14, window_size=4), (do.Turn(40, how, piece=12),)
        )
        for how in ("pieces", "generate", "layers")
    },
    # A pad that is read alone went into the state.
    "a pad alone, read into a state": do.Sequence(
        "gated delta", kv.SnapKV(14, window_size=4), (do.Turn(20, "pieces", 1, pads=(0, 9)),)
    ),
    # The judge knew of the queries that a crop takes only where it reached into a turn.
    "crop behind a turn, and a short one": llama(
        kv.SnapKV(kv.AutoBudget(lost_vote=0.05, least=1, most=14), window_size=6, kernel_size=1),
        (do.Turn(11, how="generate", answer=6), do.Crop(3), do.Turn(2)),
        HOST,
    ),
    # Sums that differ in their last bits had one number go to the next code, which is as near.
    "a number between two codes": llama(
        kv.CriticalKV(kv.KeyDiff(16, window_size=4), first_share=1.0),
        (
            do.Turn(4),
            do.Step(5),
            do.Turn(11, how="pieces", piece=5),
            do.Turn(1, how="generate", answer=4),
            do.Turn(1),
        ),
        {**HOST, "quantize": "int4"},
    ),
    # The judge compared the logits of no token.
    "a row of which nothing has come yet": llama(FITS, (do.Begin(1, of=2, pads=(1,)),)),
    # What follows a crop under recall, however the cache went on in between.
    **{
        f"crop into a prompt, then {name}": llama(
            kv.SnapKV(keep_ratio=0.2, window_size=12),
            (do.Turn(80, pads=(0, 0)), do.Crop(2), operation, do.Turn(20)),
            HOST,
        )
        for name, operation in (
            ("a copy", do.Copy()),
            ("a deep copy", do.Copy(deep=True)),
            ("a file", do.Save()),
            ("rows", do.Rows("reorder_cache", (1, 0))),
        )
    },
    **{
        f"crop of {tokens} where some layers' tails are longer": llama(
            kv.PyramidKV(22, window_size=2), (do.Turn(60), do.Crop(tokens), do.Turn(20)), HOST
        )
        for tokens in (1, 4, 7)
    },
    "crop within a prompt that comes in pieces": llama(
        FITS, (do.Begin(40, of=80), do.Crop(10), do.Step(20, together=True), do.Turn(1)), HOST
    ),
    "crop behind a turn that has begun": llama(
        FITS, (do.Turn(60), do.Begin(2, of=18), do.Crop(4), do.Turn(9, how="pieces", piece=4)), HOST
    ),
    "crop into the pads of a row": llama(
        kv.SnapKV(60, window_size=12), (do.Turn(25, pads=(15, 0)), do.Crop(9), do.Turn(60)), HOST
    ),
    "rows of ragged heads": llama(
        kv.AdaKV(kv.SnapKV(20, window_size=4)),
        (do.Turn(40, pads=(0, 0)), do.Rows("reorder_cache", (1, 0)), do.Step(2)),
    ),
    # Votes were shares of as many voters as the longest row has.
    "a budget by votes, of a row with fewer tokens than vote": llama(
        kv.AdaKV(kv.SnapKV(kv.AutoBudget(lost_vote=0.1, least=1), window_size=2, voters=20)),
        (do.Turn(38, pads=(0, 27, 7)),),
    ),
    # Scores were cut off before a window longer than the prompt, by a negative number.
    "a prompt shorter than the window of scores without votes": llama(
        kv.AcrossLayers(kv.KVzap("70%", window_size=6, gate=drawn_gate())), (do.Turn(5),)
    ),
    # Fewer queries voted than alone, so layers shared the row's budget out in another way.
    "crop into a prompt under recall, the budget shared by layers": llama(
        kv.default_policy("30%", window_size=6), (do.Turn(46), do.Crop(4), do.Step(3)), HOST
    ),
    # A layer that drops all that it had evicted was taken for one that still misses something.
    "a turn behind everything that was evicted": do.Sequence(
        "sliding",
        kv.AcrossLayers(
            kv.SnapKV(
                kv.AutoBudget(lost_vote=0.03, least=8),
                window_size=4,
                pooling="fading",
                sink_tokens=4,
                group_reduce="max",
                window_reduce="max",
            )
        ),
        (do.Turn(22, pads=(0, 1)), do.Drop(((3, 21),)), do.Crop(20), do.Turn(13, answer=4)),
    ),
    "many turns": llama(
        FITS, tuple(do.Turn(5, how="generate", answer=4) for _ in range(9)), {"turns": "compress"}
    ),
}
