"""Robustness: attacks, noise, and an audit that tells robustness from gradient masking.

A name is imported when it is first used: the names of attacks and of noise are listed without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensor_dropout.robustness.answers import Nature as Nature
    from tensor_dropout.robustness.answers import Predicted as Predicted
    from tensor_dropout.robustness.apgd import APGD as APGD
    from tensor_dropout.robustness.attack_loop import Attack as Attack
    from tensor_dropout.robustness.blackbox import RandomSearch as RandomSearch
    from tensor_dropout.robustness.blackbox import Square as Square
    from tensor_dropout.robustness.evaluation import Evaluation as Evaluation
    from tensor_dropout.robustness.evaluation import evaluate as evaluate
    from tensor_dropout.robustness.gradient_attacks import Iterated as Iterated
    from tensor_dropout.robustness.gradient_attacks import bim as bim
    from tensor_dropout.robustness.gradient_attacks import fgsm as fgsm
    from tensor_dropout.robustness.gradient_attacks import paper_attack as paper_attack
    from tensor_dropout.robustness.gradient_attacks import pgd as pgd
    from tensor_dropout.robustness.losses import LOSSES as LOSSES
    from tensor_dropout.robustness.losses import Loss as Loss
    from tensor_dropout.robustness.settings import Settings as Settings
    from tensor_dropout.robustness.target import Target as Target
    from tensor_dropout.robustness.transfer import Transfer as Transfer

_MODULES = {
    "answers": ("Nature", "Predicted"),
    "apgd": ("APGD",),
    "attack_loop": ("Attack",),
    "blackbox": ("RandomSearch", "Square"),
    "evaluation": ("Evaluation", "evaluate"),
    "settings": ("Settings",),
    "gradient_attacks": ("Iterated", "bim", "fgsm", "paper_attack", "pgd"),
    "losses": ("LOSSES", "Loss"),
    "target": ("Target",),
    "transfer": ("Transfer",),
}
_PLACES = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
