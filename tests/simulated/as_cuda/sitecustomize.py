"""Make "cuda" the simulated accelerator in every process that imports this module.

    PYTHONPATH=tests/simulated/as_cuda:. benchmarks/gpu.sh FOLDER

shows that every name in the code for a GPU exists. Its figures mean nothing.
"""

from tests.simulated import build, cuda

cuda.become(str(build.library()), 1)
