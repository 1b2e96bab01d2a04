"""What a user sees of a run. It computes no score: percentages are percent here (0 to 100), times
are seconds."""
