"""Training: one loop for classification and regression, resumable and distributed.

Data flows one way: ``config`` says what; ``sampling`` gives batches; ``step`` is one update; ``loop`` repeats it, with
``checkpoint`` and ``runs`` for what is kept; ``evaluation`` reads the result.
"""
