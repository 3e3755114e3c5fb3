"""Documents that a server reads once, compresses, and lends to every request that names one."""
