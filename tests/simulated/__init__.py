"""A simulated accelerator: its tensors compute on the CPU, on streams that run late."""
