"""Training: one loop for classification and regression, resumable and distributed.

Data flows one way: ``config`` says what; ``sampling`` gives batches; ``step`` is one update (``attack``: on attacked
inputs); ``loop`` repeats it inside of its ``run_context``, with ``state``, ``checkpoint`` and ``runs`` for what is
kept; ``evaluation`` and ``baselines`` judge the result.
"""

from tensor_dropout_lab.extras import import_extra

for _package in (
    "filelock",
    "pydantic",
    "rich",
    "tomli_w",
):  # one sentence instead of a traceback where the extra is missing
    import_extra(_package, "training")
