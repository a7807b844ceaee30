"""The arrays that kernels read and write; nothing here needs their compiler."""
