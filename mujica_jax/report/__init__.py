"""Everything that a run shows its user: progress lines, tables, trees, and metrics files.

This package only formats numbers that others computed. Unless noted otherwise, scores are in
percent (0 to 100), and times are in seconds.
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
