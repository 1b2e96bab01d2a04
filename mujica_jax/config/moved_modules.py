"""Old and new names of modules of this package that have moved.

If a user's configuration or plug-in imports an old module, the error message names the new one. The
table is only read after such an import has failed.
"""

import re
import types

# Old module name: new module name.
MOVED_MODULES = {
    "mujica_jax.agents.askable": "mujica_jax.methods.evipath.evidence",
    "mujica_jax.agents.baselines": "mujica_jax.agents.baselines.baseline",
    "mujica_jax.agents.decex_writer": "mujica_jax.methods.decex.writer",
    "mujica_jax.agents.evidence": "mujica_jax.methods.evipath.evidence",
    "mujica_jax.agents.scripted": "mujica_jax.demonstrations.policy",
    "mujica_jax.agents.scripted_decex": "mujica_jax.demonstrations.decex",
    "mujica_jax.agents.scripted_single": "mujica_jax.demonstrations.single",
    "mujica_jax.agents.scripted_text": "mujica_jax.demonstrations.mujica_text",
    "mujica_jax.agents.synthesis": "mujica_jax.methods.evipath.synthesis",
    "mujica_jax.agents.teacher": "mujica_jax.methods.evipath.teacher",
    "mujica_jax.config.method_checks": "mujica_jax.config.checks",
    "mujica_jax.config.remote": "mujica_jax.config.methods",
    "mujica_jax.config.rewards": "mujica_jax.config.methods",
    "mujica_jax.dates": "mujica_jax.retrieval.graph.values",
    "mujica_jax.inference.server": "mujica_jax.inference.jetstream.server",
    "mujica_jax.inference.stops": "mujica_jax.inference.requests",
    "mujica_jax.methods.decex": "mujica_jax.methods.decex.method",
    "mujica_jax.methods.evaluate_policies": "mujica_jax.runs.evaluate",
    "mujica_jax.methods.evaluation": "mujica_jax.runs.evaluation",
    "mujica_jax.methods.evipath": "mujica_jax.methods.evipath.method",
    "mujica_jax.methods.evipath_teacher": "mujica_jax.methods.evipath.authors",
    "mujica_jax.methods.judge": "mujica_jax.runs.judge",
    "mujica_jax.methods.learning_phase": "mujica_jax.runs.learning",
    "mujica_jax.methods.memory": "mujica_jax.runs.memory",
    "mujica_jax.methods.mismatch": "mujica_jax.runs.mismatch",
    "mujica_jax.methods.mygo_rounds": "mujica_jax.methods.mygo",
    "mujica_jax.methods.parts": "mujica_jax.runs.parts",
    "mujica_jax.methods.phases": "mujica_jax.runs.phases",
    "mujica_jax.methods.policies": "mujica_jax.runs.policies",
    "mujica_jax.methods.policy_gradient": "mujica_jax.methods.grpo",
    "mujica_jax.methods.preference_pairs": "mujica_jax.methods.decex.pairs",
    "mujica_jax.methods.remote": "mujica_jax.runs.endpoint",
    "mujica_jax.methods.rollouts": "mujica_jax.methods.grpo",
    "mujica_jax.methods.round_statistics": "mujica_jax.runs.round_statistics",
    "mujica_jax.methods.rounds": "mujica_jax.runs.sampling",
    "mujica_jax.methods.run": "mujica_jax.runs.run",
    "mujica_jax.methods.sampler": "mujica_jax.methods.mygo_worker",
    "mujica_jax.methods.search_tree": "mujica_jax.methods.decex.tree",
    "mujica_jax.methods.setup": "mujica_jax.runs.setup",
    "mujica_jax.methods.shares": "mujica_jax.runs.sampling",
    "mujica_jax.methods.tree_records": "mujica_jax.methods.decex.records",
    "mujica_jax.models.cpu_calls": "mujica_jax.kernels.cpu.calls",
    "mujica_jax.models.cpu_kernels": "mujica_jax.kernels.cpu.compiled",
    "mujica_jax.models.embedder": "mujica_jax.retrieval.embedding.embedder",
    "mujica_jax.models.encoder": "mujica_jax.retrieval.embedding.encoder",
    "mujica_jax.report.wandb_log": "mujica_jax.report.metrics_log",
    "mujica_jax.retrieval.text.embedders": "mujica_jax.retrieval.embedding.find",
    "mujica_jax.retrieval.text.embeddings": "mujica_jax.retrieval.text.vectors",
    "mujica_jax.retrieval.text.similarity": "mujica_jax.retrieval.embedding.similarity",
    "mujica_jax.rewards": "mujica_jax.rewards.reward",
    "mujica_jax.runtime.compile_counter": "mujica_jax.runtime.compilation_cache",
    "mujica_jax.tasks.two_wiki.search": "mujica_jax.tasks.graphs",
    "mujica_jax.trajectories.batches": "mujica_jax.learning.batches",
    "mujica_jax.trajectories.groups": "mujica_jax.trajectories.select",
    "mujica_jax.trajectories.packing": "mujica_jax.learning.packing",
}

# Functions that have moved out of a module which is still there: the module that holds them now.
MOVED_FUNCTIONS = {
    "mujica_jax.config.files.command_line": "mujica_jax.config.command_line",
    "mujica_jax.config.files.from_dict": "mujica_jax.config.stored",
    "mujica_jax.config.files.implementation": "mujica_jax.config.named_objects",
    "mujica_jax.config.files.named_object": "mujica_jax.config.named_objects",
    "mujica_jax.config.files.of_kind": "mujica_jax.config.kinds",
    "mujica_jax.config.files.override": "mujica_jax.config.command_line",
    "mujica_jax.eval.EvalArguments": "mujica_jax.commands.eval",
    "mujica_jax.eval.all_configs": "mujica_jax.commands.eval",
    "mujica_jax.eval.command_line": "mujica_jax.commands.eval",
    "mujica_jax.eval.find_checkpoint": "mujica_jax.commands.eval",
    "mujica_jax.eval.find_endpoint": "mujica_jax.commands.eval",
    "mujica_jax.index.build": "mujica_jax.commands.index",
    "mujica_jax.index.estimate": "mujica_jax.commands.index",
    "mujica_jax.index.query": "mujica_jax.commands.index",
    "mujica_jax.index.recall": "mujica_jax.commands.index",
    "mujica_jax.index.serve": "mujica_jax.commands.index",
    "mujica_jax.sample.sample": "mujica_jax.commands.sample",
    "mujica_jax.serve.ServeArguments": "mujica_jax.commands.serve",
    "mujica_jax.serve.serve": "mujica_jax.commands.serve",
    "mujica_jax.train.train": "mujica_jax.runs.training",
}


def moved_sentence(error: Exception) -> str | None:
    """Return a sentence with the new place of a module or function that could not be imported.

    The result is None if nothing of this name has moved.
    """
    names: list[str] = []
    if isinstance(error, ImportError) and error.name is not None:
        # For `from mujica_jax.methods import run` the error has the package as its name, and the
        # module only in its message.
        imported_name = re.match(r"cannot import name '(\w+)'", str(error))
        if imported_name:
            names.append(f"{error.name}.{imported_name[1]}")
        names.append(error.name)
    elif isinstance(error, AttributeError) and isinstance(error.obj, types.ModuleType):
        # The error is about `methods.run`, or about a function of a module that is now a package.
        names.append(f"{error.obj.__name__}.{error.name}")
        names.append(error.obj.__name__)

    for name in names:
        if name in MOVED_MODULES:
            return f"{name} is now {MOVED_MODULES[name]}"
        if name in MOVED_FUNCTIONS:
            return f"{name} is now in {MOVED_FUNCTIONS[name]}"
    return None
