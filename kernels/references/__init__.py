"""Reference slots: what a captured row's later loops are answered from, and how kernels find out whether it is there."""
