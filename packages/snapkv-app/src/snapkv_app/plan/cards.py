"""The memory of well-known accelerator cards, by the names in everyday use."""

import re

from snapkv.errors import wrong

CARDS: dict[str, tuple[int, ...]] = {
    "H100": (80, 94), "H200": (141,), "H20": (96,), "H800": (80,), "GH200": (96, 144),
    "B100": (192,), "B200": (180,), "B300": (288,),
    "A100": (40, 80), "A800": (40, 80), "A40": (48,), "A30": (24,), "A10": (24,), "A10G": (24,),
    "A16": (16,), "A2": (16,), "L4": (24,), "L40": (48,), "L40S": (48,), "L20": (48,),
    "T4": (16,), "V100": (16, 32), "P100": (16,), "A6000": (48,), "A5000": (24,), "A4000": (16,),
    "6000 Ada": (48,), "PRO 6000": (96,),
    "3060": (12,), "3080": (10, 12), "3090": (24,), "4060 Ti": (8, 16), "4070": (12,),
    "4080": (16,), "4090": (24,), "5070": (12,), "5080": (16,), "5090": (32,),
    "MI210": (64,), "MI250": (128,), "MI250X": (128,), "MI300A": (128,), "MI300X": (192,),
    "MI325X": (256,), "MI355X": (288,),
}  # fmt: skip
"""The memory sizes in which each card is sold, in GB of 10^9 bytes; drivers report no less."""

_USUAL = {"H100": 80}
"""The usual memory of a card that is sold with several."""

_ADDED = r"nvidia|geforce|rtx|tesla|amd|instinct|radeon|sxm\d?|pcie|nvl|hbm\d?e?|[\s_-]"
"""The words that people add to the name of a card."""


def card_bytes(name: str) -> int | None:
    """Return the number of bytes of memory that an accelerator card has.

    Upper and lower case, the maker and the kind of slot make no difference.

    Args:
        name: the name of the card, such as "H100", "A100-80GB" or "RTX 4090".

    Returns:
        The bytes; None if no such card is known.

    Raises:
        InvalidArgumentError: the card is sold with several sizes of memory, and `name` contains
            none of them, or a size in which the card is not sold.
    """
    known = {_plain(card): card for card in sorted(CARDS, key=len, reverse=True)}  # L40S before L4
    found = re.fullmatch(rf"({'|'.join(known)})(?:(\d+)g(?:i?b)?)?", _plain(name))
    if found is None:
        return None
    card = known[found[1]]
    size = int(found[2]) if found[2] else _USUAL.get(card)
    sizes = CARDS[card]
    if size is None and len(sizes) == 1:
        (size,) = sizes
    if size not in sizes:
        named = " or ".join(f"{card}-{each}GB" for each in sizes)
        raise wrong(
            "gpu_memory",
            f"expected {named}, but got {name!r}",
            "Use one of these names",
        )
    return size * 10**9


def _plain(name: str) -> str:
    return re.sub(_ADDED, "", name.lower())
