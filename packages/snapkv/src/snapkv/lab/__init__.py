"""Where the laboratory was in 0.1.0: now `snapkv_lab` and `snapkv.inspector`. Gone in 0.4.0."""

from snapkv.moved import moved

moved("snapkv.lab", "snapkv_lab", "snapkv-lab")
moved("snapkv.lab.inspect", "snapkv.inspector", "snapkv")
