"""Automatic mixed precision, exact for TorchScript."""
