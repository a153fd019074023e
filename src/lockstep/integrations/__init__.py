"""Equal bits in the loops of other frameworks: Lightning, Hugging Face's Trainer, Accelerate."""
