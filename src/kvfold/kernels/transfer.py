"""Small tensors between host and device, without one waiting for the other."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A host's tensor on a device, which may still be on its way there."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class OnHost:
    """Tensors on their way to the host, while the device goes on to what it is told next."""

    def __init__(self, *tensors: Tensor):
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._events = []
        for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
            self._events.append(torch.cuda.current_stream(device).record_event())

    def get(self) -> list[Tensor]:
        """The tensors, once they are there."""
        for event in self._events:
            event.synchronize()
        return self._tensors
