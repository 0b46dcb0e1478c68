"""TorchScript graph passes that turn autocast regions into explicit casts."""
