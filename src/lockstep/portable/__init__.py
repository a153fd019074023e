"""Portable bits: which kernels compute, and the fingerprint that tells which bits they have."""
