"""Finding rows and columns of a weight matrix [N, K] in the order in which it is stored: `ouro_build.artifacts.blocks`.

A buffer of such a matrix has the shape of the blocks, [N / 16, K / 32, 16, 32]. N and K themselves are those of the output
and of the activations. What lies past K in a block is zero and may be read; activations past K may not.
"""
