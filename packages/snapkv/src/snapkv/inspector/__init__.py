"""What a method kept of a prompt, and why: recorded once, shown on one page."""

from snapkv.inspector.page import as_page
from snapkv.inspector.record import Inspection, MethodRecord, inspect_prompt

__all__ = ["Inspection", "MethodRecord", "as_page", "inspect_prompt"]
