"""The laboratory: data, networks, training, evaluation, the paper's experiments and their report, and the command line.

It uses the library, ``tensor_dropout``, which never imports it.
"""
