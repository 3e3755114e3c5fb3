"""LongBench v1 (Bai et al., 2023) as published: its sets, prompts, rows and known scores."""
