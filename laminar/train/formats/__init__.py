"""Weights in formats that others read and write: safetensors, torch.save and DCP, read by slice, written one by one."""
