"""The model as a step sees it: its calls, blocks, buffers and loss, and what it must not do."""
