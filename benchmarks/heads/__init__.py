"""The benchmark of the heads; ``benchmarks/heads.py`` is its command.

``cases`` and ``contenders`` say what is timed, ``checking`` refuses heads that are wrong, ``timing`` and ``counting``
measure, ``growth`` fits slopes, ``running`` goes through all cells, ``tables`` and ``drawing`` read the record alone.
"""
