"""What goes wrong in training, made to go wrong on purpose, a few hundred times.

    python -m integration_tests.reliability               # all of it, as `nox -s reliability` does
    python -m integration_tests.reliability --kills 6 --flips 40 --configs 40 --reloads 4

Ranks are killed in real runs of the launcher (`kills`), checkpoints are damaged (`damages`) and
loaded under other layouts (`reloads`), configs are fuzzed (`fuzz`), and so are text and
directories of tokens (`mutants`); run directories come from strangers (`rundirs`, judged as all
files of strangers are: `strangers`). Folders of models are changed and read beside transformers
(`folders`, `nox -s folders`, which needs transformers). Rules of a config are held against the code
(`accepted`, `nox -s rules`: configs that are `drawn` at the edges of rules are `started`).
Everything is drawn from a seed; a case that fails is named with what to repeat it by.
"""
