"""The integration with Hugging Face transformers, the only part that knows model classes."""
