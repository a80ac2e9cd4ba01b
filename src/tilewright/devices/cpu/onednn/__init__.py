"""oneDNN 3.x: `capi` binds its C API, `runtime` executes primitives; the CPU kernels build on both."""
