"""The acceptance kit: whether hp-train is right and how fast it is on the machine in front of you.

``python -m integration_tests.acceptance`` runs cases one after the other, the most telling first,
each in a process of its own with a time-out, until all are done or the minutes are up, and leaves
one HTML page and one JSON file that can be sent to a stranger. The same command goes on where it
was stopped.

`cases` says what there is to run on a machine, `process` runs one, `work` is what happens in that
process; `layouts`, `speed`, `rivals` and `facts` are the kinds of it. `clean` takes out what is
nobody's business, `page` writes the two files, `nodes` runs layouts over several machines.
"""
