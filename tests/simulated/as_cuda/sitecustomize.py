"""Let every process below be one in which "cuda" is the simulated accelerator.

    PYTHONPATH=tests/simulated/as_cuda:. benchmarks/gpu.sh FOLDER

shows that no name in what is run on a GPU is wrong; its figures mean nothing.
"""

from tests.simulated import build, cuda

cuda.become(str(build.library()), 1)
