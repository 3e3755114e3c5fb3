"""Random sequences of operations on a compressed cache, judged by each row alone and by an oracle.

`drawing` draws them, `playing` plays them, `judging` judges each of their steps, `cases` keeps what
failed once. ``SEQUENCES=20000 SEED=1 pytest packages/snapkv/tests/sequences`` plays as many.
"""
