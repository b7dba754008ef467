"""The kernels in C++ (`csrc`), the library that they are compiled to, and its calls as operations in torch."""
