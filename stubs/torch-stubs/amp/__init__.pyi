from torch.amp.autocast_mode import (
    _enter_autocast as _enter_autocast,
)
from torch.amp.autocast_mode import (
    _exit_autocast as _exit_autocast,
)
from torch.amp.autocast_mode import (
    autocast as autocast,
)
from torch.amp.autocast_mode import (
    custom_bwd as custom_bwd,
)
from torch.amp.autocast_mode import (
    custom_fwd as custom_fwd,
)
from torch.amp.autocast_mode import (
    is_autocast_available as is_autocast_available,
)
from torch.amp.grad_scaler import GradScaler as GradScaler

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd", "is_autocast_available"]
