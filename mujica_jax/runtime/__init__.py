"""The machine that a run stands on: chips, hosts, memory, preemption, compilation."""
