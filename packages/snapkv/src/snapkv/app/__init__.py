"""From a file, a model's name and a question to an answer: what a program needs around the library.

Importing this file loads no torch.
"""
