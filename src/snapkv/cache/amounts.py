"""How a number of bytes reads."""


def format_bytes(count: float) -> str:
    """Bytes with a binary unit, such as "22.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
