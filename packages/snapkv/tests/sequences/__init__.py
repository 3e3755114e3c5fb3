"""Random sequences of cache operations, compared with each row read alone and with an oracle.

`drawing` draws them, `playing` runs them, `judging` checks each of their steps, and `cases`
holds sequences that failed earlier.

``SEQUENCES=20000 SEED=1 pytest packages/snapkv/tests/sequences`` runs 20000 of them.
"""
