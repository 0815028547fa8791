"""Robustness: attacks, noise, and an audit that tells robustness from gradient masking."""

from tensor_dropout.robustness.apgd import APGD
from tensor_dropout.robustness.blackbox import RandomSearch, Square
from tensor_dropout.robustness.iterated import Iterated, bim, fgsm, paper_attack, pgd
from tensor_dropout.robustness.losses import LOSSES, Loss
from tensor_dropout.robustness.search import Attack
from tensor_dropout.robustness.target import Nature, Predicted, Target
from tensor_dropout.robustness.transfer import Transfer

__all__ = [
    "APGD",
    "LOSSES",
    "Attack",
    "Iterated",
    "Loss",
    "Nature",
    "Predicted",
    "RandomSearch",
    "Square",
    "Target",
    "Transfer",
    "bim",
    "fgsm",
    "paper_attack",
    "pgd",
]
