from torch.cuda.amp.grad_scaler import GradScaler as GradScaler

from .autocast_mode import (
    autocast as autocast,
    custom_bwd as custom_bwd,
    custom_fwd as custom_fwd,
)
from .common import amp_definitely_not_available as amp_definitely_not_available

__all__ = [
    "GradScaler",
    "amp_definitely_not_available",
    "autocast",
    "custom_bwd",
    "custom_fwd",
]
