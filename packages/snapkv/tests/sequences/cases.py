"""Sequences that failed once, made short; what was wrong with each stands above it."""

from snapkv import (
    H2O,
    TOVA,
    AdaKV,
    AutoBudget,
    Compactor,
    CriticalKV,
    DuoAttention,
    FastGen,
    KeyDiff,
    LagKV,
    PageRecall,
    Random,
    Scissorhands,
    ScoreThreshold,
    SnapKV,
)
from tests.sequences.operations import (
    Begin,
    Crop,
    Repeat,
    Reset,
    Save,
    Select,
    Sequence,
    Step,
    Turn,
)

HOST, PAGES = {"recall": "host"}, {"recall": PageRecall(1000, page_tokens=2)}
STATIC = {"storage": "static", "room_tokens": 24}
FITS = SnapKV(18, window_size=6)

CASES = {
    # The end of a prompt that was cropped chose among the stored slots, not all that was seen.
    "crop into a prompt under recall": Sequence(
        "llama", SnapKV(keep_ratio=0.2, window_size=12), (Turn(80), Crop(2), Step(3)), HOST
    ),
    "crop into a prompt with room for all pages": Sequence(
        "llama", SnapKV(keep_ratio=0.2, window_size=12), (Turn(80), Crop(2), Step(3)), PAGES
    ),
    # A crop recalled in the layers whose tail was too short, and not in the others.
    "crop further than some layers' tail": Sequence(
        "llama", SnapKV(20, window_size=2), (Turn(33), Crop(3), Step(3)), HOST
    ),
    # A row that had kept everything was not compressed at the end of its next turn.
    "a whole row beside others, by a threshold": Sequence(
        "llama",
        ScoreThreshold(SnapKV(24, window_size=4, kernel_size=5), at_least=0.1),
        (Turn(11, pads=(0, 0, 0)), Turn(20)),
    ),
    "a whole row beside others, by shares": Sequence(
        "llama",
        AdaKV(SnapKV(AutoBudget(lost_vote=0.1, least=4), window_size=4)),
        (Turn(12, pads=(0, 0, 0)), Turn(20)),
    ),
    # A row that fitted the budget beside a longer one was refreshed, alone it was not.
    "a short row under refresh_every": Sequence(
        "llama",
        SnapKV(22, window_size=4),
        (Turn(60, pads=(0, 40)), Step(12)),
        {"recall": "host", "refresh_every": 3},
    ),
    # What a crop left of a refresh was recalled where a row beside it kept less, and not alone.
    "crop of the queries that chose, under refresh_every": Sequence(
        "llama",
        SnapKV(keep_ratio=0.2, window_size=6, pooling="fading", decay=0.935, sink_tokens=4),
        (Turn(5, pads=(0, 1)), Step(2), Step(4), Crop(6)),
        {**HOST, "refresh_every": 2},
    ),
    # transformers' own layers refused behind compressed ones that had changed.
    "crop beside sliding layers": Sequence(
        "sliding", SnapKV(20, window_size=2), (Turn(60), Step(3), Crop(2))
    ),
    "crop beside linear layers": Sequence(
        "linear", SnapKV(20, window_size=2), (Turn(60), Step(3), Crop(2))
    ),
    "repeat rows beside linear layers": Sequence(
        "linear", SnapKV(20, window_size=2), (Turn(30), Repeat())
    ),
    "select rows beside linear layers": Sequence(
        "linear", SnapKV(20, window_size=2), (Turn(30, pads=(0, 0)), Select((0,)))
    ),
    # States that are emptied by filling in zeros keep their number of rows.
    "other rows after a reset beside linear layers": Sequence(
        "linear", SnapKV(20, window_size=2), (Turn(30, pads=(0, 0)), Reset(), Turn(30))
    ),
    # A later turn that is read layer by layer was evicted from behind every piece.
    "tova, a turn by layers": Sequence(
        "llama", TOVA(8), (Turn(10), Turn(10, how="layers", piece=3))
    ),
    "h2o, a turn by layers": Sequence("llama", H2O(8), (Turn(10), Turn(10, how="layers", piece=3))),
    "duo-attention, a turn by layers": Sequence(
        "llama",
        DuoAttention(((1, 1), (1, 0), (0, 0)), sink_tokens=0, recent_tokens=12),
        (Turn(11), Turn(3, how="layers", piece=1)),
    ),
    "scissorhands, a turn by layers": Sequence(
        "llama",
        Scissorhands(24, history=6, recent=4),
        (Turn(1), Turn(25, how="layers", piece=1)),
    ),
    # A turn that is announced again in its midst was counted from there.
    "h2o, a turn that is announced twice": Sequence(
        "llama", H2O(16), (Turn(1), Begin(1, of=2), Turn(1, how="generate"))
    ),
    # The mask of all layers was cut as if it were of one that stores fewer tokens than the first.
    "duo-attention, a turn by layers of other widths": Sequence(
        "llama",
        DuoAttention(((1, 1), (1, 0), (0, 0)), sink_tokens=0, recent_tokens=12),
        (Turn(13), Turn(3, how="layers", piece=2)),
    ),
    # What was saved could not be loaded.
    "fastgen with its own tokens, saved": Sequence(
        "llama", FastGen(0.5, special_ids=(3, 4), punctuation_ids=(5, 6, 7)), (Turn(10), Save())
    ),
    # The first layer had dropped its pads, so there was no mask for those that had dropped nothing.
    "a later turn of a layer that is whole, pads in it": Sequence(
        "qk-norm",
        AdaKV(
            SnapKV(
                AutoBudget(lost_vote=0.01, least=4),
                window_size=4,
                kernel_size=1,
                pooling="avg",
                group_reduce="max",
            )
        ),
        (Turn(43, pads=(0, 1, 0)), Turn(1)),
    ),
    # Nothing was dropped by the first turn; the mask of the next one had another width.
    "static, a later turn by layers": Sequence(
        "llama",
        SnapKV(4, window_size=2),
        (Turn(1), Turn(2, how="layers", piece=1)),
        {"storage": "static"},
    ),
    "codes with recall, a later turn in pieces": Sequence(
        "llama", FITS, (Turn(1), Turn(4, how="pieces", piece=2)), {**HOST, "quantize": "int8"}
    ),
    # Refused where the first layer had read and dropped already.
    "static storage of query heads": Sequence(
        "llama",
        SnapKV(20, window_size=4, group_reduce="none"),
        (Turn(30),),
        {"storage": "static"},
    ),
    "codes of heads that differ in length": Sequence(
        "llama", AdaKV(SnapKV(20, window_size=4)), (Turn(30),), {"quantize": "int8"}
    ),
    "refresh_every of a shared latent": Sequence(
        "latent",
        SnapKV(14, window_size=4),
        (Turn(30), Step(4)),
        {"recall": "host", "refresh_every": 2},
    ),
    "fastgen by layers, beside sliding layers": Sequence(
        "sliding",
        FastGen(0.5, special_ids=(3, 4), punctuation_ids=(5, 6, 7)),
        (Turn(30, how="layers", piece=8),),
    ),
    "compactor, a turn behind one that fitted": Sequence(
        "llama", Compactor(keep_ratio=0.1, window_size=2, sink_tokens=1), (Turn(2), Turn(6))
    ),
    "query heads of a shared latent": Sequence(
        "latent", SnapKV(10, window_size=4, group_reduce="none"), (Turn(30), Step(2))
    ),
    # The slots of the row that keeps most were counted, so that another one was left with nothing.
    "crop of all that a row keeps": Sequence(
        "latent",
        ScoreThreshold(SnapKV(8, window_size=6, kernel_size=5), at_least=0.2),
        (Turn(10, pads=(0, 2)), Crop(6)),
    ),
    # What was left of codes that were cropped counted as held as it came.
    "crop into codes of all that was seen, under recall": Sequence(
        "llama", Random(28, window_size=8), (Turn(2), Crop(1)), {**HOST, "quantize": "int8"}
    ),
    "crop into codes of all that was seen, with pages": Sequence(
        "llama", LagKV(12, window_size=4), (Turn(2), Crop(1)), {**PAGES, "quantize": "fp8"}
    ),
    # Refused at the first token without a slot, when others of its turn had been read.
    "static, a turn by layers that has no room": Sequence(
        "llama", FITS, (Turn(10), Turn(40, how="layers", piece=4)), STATIC
    ),
    "static, a turn in pieces that has no room": Sequence(
        "llama", FITS, (Turn(10), Turn(40, how="generate", piece=4)), STATIC
    ),
    "static, an answer behind a turn that has no room": Sequence(
        "llama", FITS, (Turn(10), Turn(30, how="generate", answer=6)), STATIC
    ),
    # The judge knew of the queries that a crop takes only where it reached into a turn.
    "crop behind a turn, and a short one": Sequence(
        "llama",
        ScoreThreshold(SnapKV(14, window_size=6, kernel_size=1), at_least=0.05),
        (Turn(11, how="generate", answer=6), Crop(3), Turn(2)),
        HOST,
    ),
    # The judge read on behind a crop that was done alone, too, when the next one reached before it.
    "crop before a crop, under refresh_every": Sequence(
        "llama",
        SnapKV(6, window_size=2),
        (Turn(2), Step(), Crop(1), Step(), Crop(2)),
        {**PAGES, "refresh_every": 1},
    ),
    # Sums that differ in their last bits had one number go to the next code, which is as near.
    "a number between two codes": Sequence(
        "llama",
        CriticalKV(KeyDiff(16, window_size=4), first_share=1.0),
        (
            Turn(4),
            Step(5),
            Turn(11, how="pieces", piece=5),
            Turn(1, how="generate", answer=4),
            Turn(1),
        ),
        {**HOST, "refresh_every": 1, "quantize": "int4"},
    ),
    # The judge compared the logits of no token.
    "a row of which nothing has come yet": Sequence("llama", FITS, (Begin(1, of=2, pads=(1,)),)),
}
