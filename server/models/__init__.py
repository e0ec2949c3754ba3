"""The models of a process: which there are, which are loaded, and which a request means.

`roster.py` decides, without doing anything; `models.py` does it; `model.py` is one model as requests see it,
`catalogue.py` all of them;
`holdings.py` has the bytes that the loaded ones hold, `faults.py` what the others failed with.
"""
