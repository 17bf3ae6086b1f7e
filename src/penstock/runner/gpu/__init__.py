"""The runner's parts that use GPU kernels, or Triton's interpreter on a CPU that emulates a GPU.

Each has a CPU version with the same interface, and the runner gets one or the other when it is built. Only two things
here wait for the device: a result that is requested, and a ring whose next slot has not been copied yet.
"""
