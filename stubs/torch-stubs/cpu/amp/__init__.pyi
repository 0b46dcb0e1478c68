from torch.cpu.amp.grad_scaler import GradScaler as GradScaler

from .autocast_mode import autocast as autocast
