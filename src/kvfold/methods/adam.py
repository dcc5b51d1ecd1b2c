"""Adam with the interface of `lbfgs.LBFGS`: the control."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.methods.lbfgs import Objective


class Adam:
    """Minimise independent functions; see `lbfgs.LBFGS`."""

    def __init__(self, x: Tensor, rate: float):
        self.x = x.clone()
        self._adam = torch.optim.Adam([self.x], lr=rate)

    def run(self, objective: Objective, iterations: int) -> Tensor:
        every = torch.arange(len(self.x), device=self.x.device)
        for _ in range(iterations):
            loss, self.x.grad = objective(self.x, every)
            self._adam.step()
        return loss
