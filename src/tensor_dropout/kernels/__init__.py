"""Triton kernels of whole heads: the features are read once in each direction, and few kernels are launched.

``dispatch`` decides where they are used; ``tucker`` and ``cp`` are the two heads as ``torch.library`` operators, made
of the kernels in ``products`` (matrix products), ``spatial`` (Tucker) and ``columns`` (CP). The plain path of the
layers is the truth they are tested against, and what runs wherever they do not win.
"""
