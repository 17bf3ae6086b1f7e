"""The parts of `bench/gpu.py` and `bench/gpu_tune.py`."""
