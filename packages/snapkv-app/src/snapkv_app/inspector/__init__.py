"""Compare the tokens that methods keep at several budgets, their votes, and their answers."""

from snapkv_app.inspector.record import Inspection, inspect_prompt

__all__ = ["Inspection", "inspect_prompt"]
