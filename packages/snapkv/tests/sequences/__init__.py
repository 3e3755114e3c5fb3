"""Random sequences of operations on a compressed cache, judged by each row alone and by an oracle.

`drawing` draws them, `playing` plays them, `judging` judges each of their steps, `shrinking` makes
short what fails, `cases` keeps what failed once.
``python -m tests.sequences --count 20000 --seed 0 --processes 2`` plays as
many and says what became of them.
"""
