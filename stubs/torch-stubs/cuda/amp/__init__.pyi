from torch.cuda.amp.autocast_mode import (
    autocast as autocast,
)
from torch.cuda.amp.autocast_mode import (
    custom_bwd as custom_bwd,
)
from torch.cuda.amp.autocast_mode import (
    custom_fwd as custom_fwd,
)
from torch.cuda.amp.common import amp_definitely_not_available as amp_definitely_not_available
from torch.cuda.amp.grad_scaler import GradScaler as GradScaler

__all__ = [
    "GradScaler",
    "amp_definitely_not_available",
    "autocast",
    "custom_bwd",
    "custom_fwd",
]
