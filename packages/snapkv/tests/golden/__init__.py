"""What the library does today, case by case, written down so that every change can be held to it.

    python -m tests.golden --write FILE        record
    python -m tests.golden --against FILE      record again and compare, bit for bit
    python -m tests.golden --checkout FOLDER   the same against the source of another checkout

Only public names are used, so that the same cases run on any checkout. `--set` says how many cases.
"""
