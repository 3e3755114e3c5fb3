"""Where Hugging Face transformers is met: the only room that knows a model."""
