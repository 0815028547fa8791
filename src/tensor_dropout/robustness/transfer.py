"""Attacks by way of another network: what fools a twin may fool the target, whatever the target's gradients say."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import Tensor

from tensor_dropout.robustness.attack_loop import Attack, Search
from tensor_dropout.robustness.target import Target


@dataclass(frozen=True)
class Transfer:
    """Attack a source network, and try what was found on the target (Papernot et al., 2017).

    Attributes:
        attack: the attack on the source.
        source: another network for the same inputs, such as a twin trained with another seed.
    """

    attack: Attack
    source: Target

    @property
    def name(self) -> str:
        """For records: "transfer-pgd"."""
        return f"transfer-{self.attack.name}"

    @property
    def epsilon(self) -> float:
        """The radius of the attack on the source."""
        return self.attack.epsilon

    def __call__(self, target: Target, x: Tensor, y: Tensor) -> Tensor:
        """The source's worst inputs where they are worse for the target too, the clean ones elsewhere."""
        loss = "margin" if target.task == "classification" else "absolute"
        search = Search(target, x, y, loss, self.epsilon, leave=False)
        search.begin()
        case = search.standing()
        source = copy.copy(self.source)
        source.exhaustive = True
        found = target.clip(self.attack(source, case.x, y))
        search.note(case, found, search.score(case, found))
        return search.worst
