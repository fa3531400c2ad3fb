"""Every operation of a model, seen as it is called."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Inside, ``see`` computes the result of every operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or PyTorch would load its compiler at the first operation: seconds, for nothing

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self.see(func, args, kwargs or {})

    def see(self, operation: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError
