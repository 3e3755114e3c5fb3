"""``python -m snapkv``."""

from snapkv.cli import main

main()
