"""Triton kernels, one idea a file: the kernel, its launcher, a worked example and its oracle.

Only the device path imports this room: Triton comes with a CUDA build of torch.
"""
