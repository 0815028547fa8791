"""Training: one loop for classification and regression, resumable and distributed.

Data flows one way: ``config`` says what; ``sampling`` gives batches; ``step`` is one update (``attack``: on attacked
inputs); ``loop`` repeats it inside of its ``surroundings``, with ``state``, ``checkpoint`` and ``runs`` for what is
kept; ``evaluation`` and ``baselines`` judge the result.
"""
