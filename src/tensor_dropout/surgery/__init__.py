"""Surgery on trained networks: a head becomes a tensor regression, exactly, and a plain layer again."""
