"""What a user sees of a run: progress of a stage, the closing table, one solved question as a tree, and the metrics
files.

Methods and entry points call this; it computes no score. Percentages are percent here (0 to 100), times are seconds.
rich and tensorboardX are imported at their first use, so that importing this package costs nothing.
"""

from mujica_jax.report.metrics_log import MetricsLog, NoMetrics
from mujica_jax.report.progress import NoConsole, Progress, Stage
from mujica_jax.report.results import PhaseRow, Summary, closing_table, question_tree, score_table, summary_dict
from mujica_jax.report.stage_clock import StageClock
from mujica_jax.report.text import plain, visible

__all__ = [
    "MetricsLog",
    "NoConsole",
    "NoMetrics",
    "PhaseRow",
    "Progress",
    "Stage",
    "StageClock",
    "Summary",
    "closing_table",
    "plain",
    "question_tree",
    "score_table",
    "summary_dict",
    "visible",
]
