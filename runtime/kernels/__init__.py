"""The kernels in C++ (`csrc`), the library that they are compiled to, and their registration as torch operations."""
