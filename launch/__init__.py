"""The training job that uses distamp from outside; not part of the installed package."""
