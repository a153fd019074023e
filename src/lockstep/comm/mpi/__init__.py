"""The backend "mpi4py" of `torch.distributed`, for ranks that mpiexec starts."""
