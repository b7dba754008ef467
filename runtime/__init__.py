"""The engine: everything but the command line."""

import os

# What lies between two kernels is computed by OpenMP's threads, which then wait for more work: 15 ms by default, on the
# cores that the kernels' own threads want. GNU's OpenMP reads this when torch is loaded. It counts in `pause`
# instructions: here 0.2 to 0.5 ms. A prompt of 900 tokens took 1.5 times as long without.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "10000"
