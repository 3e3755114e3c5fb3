"""Tests of `snapkv.ops` and of what `SnapKV` keeps, judged by oracles written from the paper."""
