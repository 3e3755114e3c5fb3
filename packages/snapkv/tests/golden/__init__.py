"""What the library does today, case by case, written down so that every change can be held to it.

    python -m tests.golden --write FILE        record, such as with the source of another checkout
    python -m tests.golden --against FILE      record again and compare, bit for bit

Only public names are used, so that the same cases run on any checkout.
"""
