from torch.cpu.amp.autocast_mode import autocast as autocast
from torch.cpu.amp.grad_scaler import GradScaler as GradScaler
