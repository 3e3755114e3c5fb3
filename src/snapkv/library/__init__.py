"""Documents that a model has read once, in a folder, for questions at any later time.

`library.py` is what users call. `folder.py` and `records.py` know files, `bm25.py` and
`passages.py` words, `frame.py` and `sheets.py` tokens; `blending.py` puts caches together.
"""
