"""What a program needs to get from files, a model's name and a question to an answer.

Importing this file loads no torch.
"""
