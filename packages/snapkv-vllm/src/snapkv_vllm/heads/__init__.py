"""Requests whose KV heads hold different numbers of tokens, on vLLM's own kernels.

vLLM has one table of blocks for all heads of a layer. A block is as many pages as the layer has KV
heads, and nothing but that table says which head a page belongs to. So the pages of a request's
blocks are handed out anew, every head of every request is shown to the kernels as a sequence of its
own with one KV head, and the scheduler counts blocks as ever.
"""
