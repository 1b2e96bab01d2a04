"""Accept the old names of renamed configuration fields.

An old name works for one release: as a flag, as an argument in a configuration file and as an
attribute. One line on stderr names the new one. A `config.json` of an earlier version is read
without a message. A row is removed from the table one release after it was added.
"""

import dataclasses
import functools
import sys
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mujica_jax.config.fields import flag_of, union_members
from mujica_jax.errors import UserError

# Old dotted name: new dotted name. Both are in the same section.
RENAMED_FIELDS = {
    "trainer.rows_per_step": "trainer.batch_size",
    "trainer.row_tokens": "trainer.sequence_length",
    "trainer.data": "trainer.data_parallel_size",
    "trainer.tensor": "trainer.tensor_parallel_size",
    "engine.slots": "engine.max_num_seqs",
    "engine.tensor": "engine.tensor_parallel_size",
    "sampling.shard_questions": "sampling.questions_per_shard",
    "method.group_attempts": "method.group_size",
    "method.rows_per_update": "method.mini_batch_size",
    "method.rounds_per_phase": "method.rounds_per_evaluation",
    "warmup.rise_steps": "warmup.lr_warmup_steps",
    "metrics.every_steps": "metrics.logging_steps",
    "distributed.processes": "distributed.num_processes",
    "distributed.process": "distributed.process_id",
    "method.fixed_threshold": "method.initial_threshold",
}


def accept_old_names(config: type) -> None:
    """Make the dataclasses of a configuration's sections accept the old names of their fields."""
    for section, hint in typing.get_type_hints(config).items():
        for kind in union_members(hint):
            if not dataclasses.is_dataclass(kind):
                continue
            new_names = _new_names(section, kind)
            if new_names:
                _accept(kind, section, new_names)


def new_names_of(kind: type) -> Mapping[str, str]:
    """Return the old field names that a section accepts, each with its new name."""
    return getattr(kind, "_new_names", {})


def with_new_flags(words: Sequence[str], sections: Mapping[str, Collection[type]]) -> list[str]:
    """Return a command line in which old flags have their new names. Print each change on stderr.

    `sections` maps each section to the dataclasses that it may be. Raises UserError if a field is
    set under both names.
    """
    new_fields: dict[str, str] = {}
    for section, kinds in sections.items():
        own_fields = {field.name for kind in kinds for field in dataclasses.fields(kind)}
        for kind in kinds:
            for old, new in new_names_of(kind).items():
                if old not in own_fields:
                    new_fields[f"{section}.{old}"] = f"{section}.{new}"

    named_fields = {_field_of(word) for word in words}
    renamed_words: list[str] = []
    for word in words:
        old = _field_of(word)
        new = new_fields.get(old)
        if new is None:
            renamed_words.append(word)
            continue
        if new in named_fields:
            raise UserError(_both_sentence(old, new))
        _say_once(old, new)
        _, equals, value = word.partition("=")
        renamed_words.append(f"{flag_of(new)}{equals}{value}")
    return renamed_words


def with_new_keys(stored: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored configuration whose renamed fields have the names of the current one."""
    renamed = dict(stored)
    for old, new in RENAMED_FIELDS.items():
        section, _, old_field = old.rpartition(".")
        new_field = new.rpartition(".")[2]
        stored_section = renamed.get(section)
        current_section = current.get(section)
        if not (isinstance(stored_section, Mapping) and isinstance(current_section, Mapping)):
            continue
        is_renamed = new_field in current_section and old_field not in current_section
        if is_renamed and old_field in stored_section:
            renamed[section] = {
                new_field if name == old_field else name: value
                for name, value in stored_section.items()
            }
    return renamed


def _new_names(section: str, kind: Any) -> dict[str, str]:
    """Return the old field names of a dataclass, each with its new name.

    A user's own dataclass may have a field that is called like an old name. That field stays.
    """
    fields = {field.name for field in dataclasses.fields(kind)}
    new_names = {}
    for old, new in RENAMED_FIELDS.items():
        old_section, _, old_field = old.rpartition(".")
        new_field = new.rpartition(".")[2]
        if old_section == section and new_field in fields and old_field not in fields:
            new_names[old_field] = new_field
    return new_names


def _accept(kind: Any, section: str, new_names: Mapping[str, str]) -> None:
    """Make the constructor and the attributes of a dataclass accept these old names."""
    constructor = kind.__init__
    fields = {field.name for field in dataclasses.fields(kind) if field.init}

    @functools.wraps(constructor)
    def construct(self: Any, *values: Any, **named_values: Any) -> None:
        # `dataclasses.replace` passes every field, unchanged ones with their present values. So
        # both names are present if the caller passed the old one.
        is_replacing = fields <= named_values.keys()
        for old, new in new_names.items():
            if old not in named_values:
                continue
            if new in named_values and not is_replacing:
                raise UserError(_both_sentence(f"{section}.{old}", f"{section}.{new}"))
            _say_once(f"{section}.{old}", f"{section}.{new}")
            named_values[new] = named_values.pop(old)
        constructor(self, *values, **named_values)

    def read_attribute(self: Any, name: str) -> Any:
        """Return the field with this old name. Python calls it for attributes that are missing."""
        if name not in new_names:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        _say_once(f"{section}.{name}", f"{section}.{new_names[name]}")
        return getattr(self, new_names[name])

    kind.__init__ = construct
    kind.__getattr__ = read_attribute
    kind._new_names = new_names


def _field_of(word: str) -> str:
    """Return the dotted name of the field that a flag sets, or "" for a word that is no flag."""
    if not word.startswith("--"):
        return ""
    return word.partition("=")[0].removeprefix("--").replace("-", "_")


def _both_sentence(old: str, new: str) -> str:
    """Return the error message for a field that is set under both names."""
    return f"{old} is the old name of {new} and both are set: leave out {old}"


@functools.cache
def _say_once(old: str, new: str) -> None:
    """Print on stderr, once in a process, that a field has a new name."""
    print(f"{old} is now {new}; the old name works in this release", file=sys.stderr, flush=True)
