"""Transports on NCCL."""
