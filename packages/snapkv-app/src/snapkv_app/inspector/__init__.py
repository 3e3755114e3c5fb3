"""What methods keep of a prompt at several budgets, who voted for it, and what they answer."""

from snapkv_app.inspector.record import Inspection, inspect_prompt

__all__ = ["Inspection", "inspect_prompt"]
