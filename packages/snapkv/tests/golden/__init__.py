"""What the library does today, case by case, written down so that every change can be held to it.

    python -m tests.golden --add CASE ...      record cases that the committed file lacks
    python -m tests.golden --renew             record all of its cases anew

Only public names are used, so that the same cases run on any checkout.
"""
