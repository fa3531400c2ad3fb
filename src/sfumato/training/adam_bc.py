"""Adam whose second moment is free of the noise's bias.

Tang, Shpilevskiy & Lécuyer 2024, DP-AdamBC: your DP-Adam is actually DP-SGD (unless you apply bias
correction), https://arxiv.org/abs/2312.14334.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class AdamBC(torch.optim.Optimizer):
    """Adam on noisy gradients: the planned variance of the noise is subtracted from the second moment.

    update = mean / sqrt(max(square - noise_stddev², floor · noise_stddev²)), both moments corrected for their
    start at zero as in Adam. Without the subtraction the noise outweighs the squared gradients, the
    denominator is nearly the same for every parameter, and Adam is SGD with momentum. The paper's constant γ'
    is ``floor · noise_stddev²`` here, so that it means the same for every clip norm and batch size.

    ``noise_stddev`` is that of each coordinate of the gradient, known from the plan alone: nothing is
    estimated from data, and the update is a function of noisy sums.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        noise_stddev: float,
        beta1: float = 0.9,
        beta2: float = 0.999,
        floor: float = 0.1,
    ) -> None:
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
            raise ValueError(f"beta1 = {beta1} and beta2 = {beta2} are not both from 0 to below 1")
        if not (lr >= 0 and noise_stddev > 0 and 0 < floor < float("inf")):
            raise ValueError(
                f"lr = {lr}, noise_stddev = {noise_stddev}, floor = {floor} are not all positive"
            )
        defaults = {"lr": lr, "noise_stddev": noise_stddev, "beta1": beta1, "beta2": beta2, "floor": floor}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """One update; there is no closure, since each loss would cost budget."""
        if closure is not None:
            raise TypeError("AdamBC takes no closure")
        for group in self.param_groups:
            beta1, beta2 = group["beta1"], group["beta2"]
            variance = group["noise_stddev"] ** 2
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                memory = self.state[parameter]
                if not memory:
                    memory["step"] = torch.tensor(0.0, dtype=torch.float64)
                    memory["mean"] = torch.zeros_like(parameter)
                    memory["square"] = torch.zeros_like(parameter)
                memory["step"] += 1
                count = memory["step"].item()
                memory["mean"].lerp_(parameter.grad, 1 - beta1)
                memory["square"].lerp_(parameter.grad.square(), 1 - beta2)
                square = memory["square"] / (1 - beta2**count)
                root = square.sub_(variance).clamp_(min=group["floor"] * variance).sqrt_()
                parameter.addcdiv_(memory["mean"], root, value=-group["lr"] / (1 - beta1**count))
