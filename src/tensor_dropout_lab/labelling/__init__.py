"""``tensor-dropout label``: points on pictures, placed by a person and by a head that is fitted while the person labels.

A folder of pictures (``folder``) and the journal of what was done (``journal``) give who is where (``labels``), which is
written as a table (``points_file``). A process of its own computes features and fits (``worker``); a small server
(``server``) shows a page.
"""
