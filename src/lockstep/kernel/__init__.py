"""The determinism guarantee, readable alone: its rules as files, in this order.

    splitting       rule 1: a batch is split into M micro-batches
    loss_weights    rule 2: the share of a micro-batch in the loss of the batch
    seeds           rule 3: the seed of every random number is a key of what is computed
    rng_scopes      rule 3: which parts of a model have a seed of their own
    tree            rule 4: the order of all additions
    buffer_rules    rule 5: what a module says about its buffers
    buffers         rule 5: what micro-batches write is merged
    exact_sum       rule 6: sums that need no order
    norm            rule 6: the norm of the whole gradient, and clipping by it
    loss_scale      rule 6: the scale of float16 losses
    step            all rules, in the order of one optimizer step, on every rank
      batch           which micro-batches of the batch this rank has
      step_context    what an attempt at a step is given, and what it has found
      layout, parts   what a step needs of communication, models and optimizers, as protocols
      rank_status     what the ranks tell each other, combined
      step_checks     the errors that prevent a step
      step_hooks      features that take part in a step
    spec            all rules once more, in plain PyTorch on one process
    errors          the errors that the rules raise

The files import torch, the standard library and each other.
"""
