"""What the library does today, case by case, written down so that every change can be held to it.

    python -m tests.golden --renew CASE ...    record these cases, also new ones
    python -m tests.golden --renew             record all cases anew

Only public names are used, so that the same cases run on any checkout.
"""
