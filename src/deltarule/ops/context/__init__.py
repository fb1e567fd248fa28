"""One sequence over several processes: what each holds of it, and what they tell each other."""

from deltarule.ops.context.context import Context, check_context, make_context

__all__ = ["Context", "check_context", "make_context"]
