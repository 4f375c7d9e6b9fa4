"""A step on a GPU: planned, exchanged and computed by queued work that never waits for the host."""
