"""The runner's parts that work by the kernels of a GPU, or in Triton's interpreter on a CPU that stands in for one.

Each has a form for the CPU with the same interface, and the runner gets one or the other when it is built. Nothing here
waits for the device but a result that is asked for, and a ring that laps what has not been copied yet.
"""
