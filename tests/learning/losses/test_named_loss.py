"""Losses that `method.loss` names: what is used, and what is refused."""

import pytest

from mujica_jax.errors import UserError
from mujica_jax.learning.losses import MLE
from mujica_jax.learning.losses.loss import named_loss
from tests.helpers.plug_in_modules import write_module as write_module

LOSSES = """
import dataclasses
from mujica_jax.learning.losses import MLE, Loss

@dataclasses.dataclass(frozen=True, kw_only=True)
class Steep(MLE):
    slope: float

made = Steep(slope=2.0)

class Empty(Loss):
    pass

@dataclasses.dataclass
class Changeable(Loss):
    def of(self, log_probs, batch, counts): ...

number = 3
"""


def test_without_a_name_there_is_no_loss():
    assert named_loss(None) is None


def test_a_loss_is_a_class_without_required_fields_or_a_loss_that_is_made(write_module):
    write_module("own_losses", LOSSES)
    assert named_loss("mujica_jax.learning.losses:MLE") == MLE()
    made = named_loss("own_losses:made")
    assert made is not None
    assert vars(made)["slope"] == 2.0


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Steep", r"but it needs arguments \(.*'slope'\): give its fields defaults, or name"),
        ("Empty", "but a loss is a frozen dataclass that defines `of` or `__call__`"),
        ("Changeable", "but a loss is a frozen dataclass that defines `of` or `__call__`"),
        ("number", "but it is no loss: derive it from mujica_jax.learning.losses.Loss"),
        ("Stepe", r"but the module own_losses has no Stepe; did you mean Steep\?"),
    ],
)
def test_what_is_no_loss_is_refused(write_module, name, sentence):
    write_module("own_losses", LOSSES)
    with pytest.raises(UserError, match=sentence):
        named_loss(f"own_losses:{name}")


def test_a_loss_with_columns_is_refused():
    with pytest.raises(UserError) as refused:
        named_loss("mujica_jax.learning.losses:DPO")
    assert str(refused.value) == (
        "method.loss is mujica_jax.learning.losses:DPO, which reads the columns pairs, "
        "reference_log_probs, but the rows of this method have none: use a loss without columns, "
        "or write a method that packs them"
    )
