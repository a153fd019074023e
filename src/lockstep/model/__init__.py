"""What a step knows of a model: its calls, blocks, buffers and loss, and what it must not do."""
