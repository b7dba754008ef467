"""Arrival times of requests: all at once, or as a Poisson process."""

import math

import numpy as np


def arrival_times(num_requests: int, request_rate: float, seed: int) -> list[float]:
    """Seconds from the first request to each, in order: gaps are exponential with mean 1 / `request_rate`.

    An infinite rate sends all at once. Unlike `vllm bench serve`, which stretches the whole to num_requests /
    request_rate seconds, the gaps are left as they were drawn, so that arrivals are Poisson.
    """
    if math.isinf(request_rate):
        return [0.0] * num_requests
    gaps = np.random.default_rng(seed).exponential(1 / request_rate, num_requests - 1)
    times: list[float] = [0.0, *np.cumsum(gaps).tolist()]
    return times
