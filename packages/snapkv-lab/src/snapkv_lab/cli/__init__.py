"""The commands that the laboratory brings to `snapkv`."""
