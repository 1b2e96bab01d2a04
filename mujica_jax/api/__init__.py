"""The Python API: load a policy, ask it, train, evaluate, search and read trajectories.

`import mujica_jax as mj` makes all of it available. Each name is loaded when it is first used.
"""
