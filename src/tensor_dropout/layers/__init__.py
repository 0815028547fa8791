"""Tensor regression layers and tensor dropout: project, mask, contract, expand."""
