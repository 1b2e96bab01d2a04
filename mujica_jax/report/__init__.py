"""The output of a run, as a user sees it.

Nothing here computes a score. Percentages are percent (0 to 100), times are seconds.
"""

from mujica_jax.report.metrics_log import MetricsLog, NoMetrics
from mujica_jax.report.progress import Progress
from mujica_jax.report.results import PhaseRow, closing_table, question_tree, score_table
from mujica_jax.report.stage_clock import StageClock

__all__ = [
    "MetricsLog",
    "NoMetrics",
    "PhaseRow",
    "Progress",
    "StageClock",
    "closing_table",
    "question_tree",
    "score_table",
]
