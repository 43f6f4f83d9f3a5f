"""The Hessian of the loss and its Gauss-Newton matrix: products with them, eigenvalues, traces, whole spectra."""
