"""``tensor-dropout label``: points on pictures, placed by a person and by a head that is fitted meanwhile.

A folder of pictures (``folder``) and the journal of what was done (``journal``) give who is where (``labels``), which
is written as a table (``points_file``). All of it is a session (``session``). A process of its own computes features
and fits (``worker``), when the loop asks for it (``fit_loop``, ``messages``); a small server (``server``) shows a page.
"""
