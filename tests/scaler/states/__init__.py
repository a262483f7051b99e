"""States that versions of the scaler wrote, as files, and how each scaler went on from its own.

``python -m tests.scaler.states NAME`` writes those of the version that is installed into the folder
NAME, which must not exist: what was once written is never written again.
"""
