"""Take groups from environments and hand batches to the trainer, by Atropos' own `run-api` with
a queue in front.
"""
