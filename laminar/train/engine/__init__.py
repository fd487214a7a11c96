"""From batches to compiled steps: graphs captured and guarded, programs kept by shape of batch, pipes opened."""
