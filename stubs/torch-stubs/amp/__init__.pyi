from torch.amp.grad_scaler import GradScaler as GradScaler

from .autocast_mode import (
    _enter_autocast as _enter_autocast,
    _exit_autocast as _exit_autocast,
    autocast as autocast,
    custom_bwd as custom_bwd,
    custom_fwd as custom_fwd,
    is_autocast_available as is_autocast_available,
)

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd", "is_autocast_available"]
