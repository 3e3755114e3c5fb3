"""What methods keep of a prompt at several budgets, who voted for it, and what they answer."""

from snapkv.inspector.record import BudgetRecord, Inspection, MethodRecord, inspect_prompt

__all__ = ["BudgetRecord", "Inspection", "MethodRecord", "inspect_prompt"]
