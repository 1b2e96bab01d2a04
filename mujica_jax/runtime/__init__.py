"""The machine of a run: chips, processes, memory, preemption and compilation."""
