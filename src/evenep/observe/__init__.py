"""What happened: step records."""

from .records import STAGES, StepRecord

__all__ = ["STAGES", "StepRecord"]
