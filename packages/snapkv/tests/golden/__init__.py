"""The golden record: the results of many cases, with which every change is compared.

    python -m tests.golden --renew CASE ...    record these cases, also new ones
    python -m tests.golden --renew             record all cases anew

Only public names are used, so that the same cases run on any checkout.
"""
